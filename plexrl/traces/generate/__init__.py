"""Generation of traces: distributions, fitting, published profiles."""
