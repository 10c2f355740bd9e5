"""Rollout coordination: staleness, trajectories, routing, tail batching (design: pure cores). Empty so far."""
