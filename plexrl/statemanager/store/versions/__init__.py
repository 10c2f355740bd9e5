"""Versions of a deployment's state."""
