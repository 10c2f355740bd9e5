"""Simulates asynchronous rollout and training under a staleness bound, beside other systems."""
