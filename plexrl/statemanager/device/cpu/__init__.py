"""A device that stands for a GPU on a node that has none."""
