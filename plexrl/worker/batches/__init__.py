"""Batches in a worker: packing, losses, logprobs."""
