"""Invariants of a simulated run."""
