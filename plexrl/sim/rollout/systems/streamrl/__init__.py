"""StreamRL on the virtual clock: dispatch by ranks, streamed batches, division of the GPUs."""
