"""Nodes of a Ray cluster as nodes of ours."""
