"""Losses of nodes and workers, moves to other groups, deadlocks and preemption. Pure."""
