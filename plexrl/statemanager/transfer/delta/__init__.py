"""Deltas between two versions of the same bytes."""
