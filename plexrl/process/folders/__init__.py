"""Folders of a cluster on one machine, and their access control."""
