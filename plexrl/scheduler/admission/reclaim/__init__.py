"""Takes GPUs back from jobs that are stuck or have no controller."""
