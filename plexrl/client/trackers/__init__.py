"""Experiment trackers, which show the rows of a job's metrics elsewhere."""
