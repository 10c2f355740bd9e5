"""Batches in a worker: packing, losses, log-probabilities."""
