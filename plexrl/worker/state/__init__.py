"""A worker's tensors: their layout in the arena, moves, weight syncs and checkpoints."""
