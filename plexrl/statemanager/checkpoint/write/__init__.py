"""Writing a checkpoint."""
