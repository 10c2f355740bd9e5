"""The queues of deployments without GPUs."""
