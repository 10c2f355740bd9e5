"""Runs many scenarios: sweeps, what-ifs and searches for the smallest cluster."""
