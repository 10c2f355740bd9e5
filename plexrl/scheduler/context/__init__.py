"""What the core's steps work on: the cluster with its indexes, the settings, and their effects."""
