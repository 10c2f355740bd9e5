"""The trajectories of instances: those that they have, and those on their way."""
