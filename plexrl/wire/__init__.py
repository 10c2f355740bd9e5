"""Wire formats: frames, RPC, tensors, messages, operations and the checks of their parameters."""
