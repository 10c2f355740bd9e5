"""Rollout coordination: staleness, trajectories, routing, tail batching. Empty so far."""
