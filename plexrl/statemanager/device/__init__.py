"""Where tensors compute: memory of a device, shared by a worker and the StateManager."""
