"""Placement: the GPUs that a deployment gets, and its moves. Pure."""
