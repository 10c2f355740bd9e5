"""Device memory that a deployment needs on each of its GPUs, from its specification."""
