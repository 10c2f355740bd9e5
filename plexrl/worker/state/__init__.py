"""A worker's tensors: where they lie, how they move, how they are saved."""
