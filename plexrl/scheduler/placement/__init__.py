"""Placement: the GPUs that a deployment gets, and the queues of those without. Pure."""
