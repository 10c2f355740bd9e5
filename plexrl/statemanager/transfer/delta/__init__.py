"""Differences between two versions of the same bytes."""
