"""Where checkpoints are: a directory that all nodes share, or an object store."""
