"""Checks of a submission, and the limits on accepted operations."""
