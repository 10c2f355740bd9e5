"""The contents of an arena, as its device computes them."""
