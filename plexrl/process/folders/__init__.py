"""Folders of a cluster on one machine, and who may enter them."""
