"""Checks whether deployments can fit. Pure."""
