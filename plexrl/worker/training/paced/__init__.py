"""Paced training: a tiny real state, deterministic results, and the times of a modelled GPU."""
