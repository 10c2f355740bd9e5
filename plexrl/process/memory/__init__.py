"""Memory of processes: where it lies, how much is left, how it is copied."""
