"""Runs of one system, or of several, each with its best split of the GPUs."""
