"""Rollout coordination under a staleness bound: trajectories, staleness protocol, coordinator."""
