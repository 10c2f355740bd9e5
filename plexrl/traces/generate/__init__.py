"""Generated traces: distributions, fitting, published profiles."""
