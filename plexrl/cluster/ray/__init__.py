"""Runs a cluster on the nodes of a Ray cluster."""
