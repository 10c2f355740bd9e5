"""Predicts how long the members of a group wait for each other."""
