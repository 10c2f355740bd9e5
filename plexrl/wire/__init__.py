"""Messages between processes: framing, RPC, codec, tensors, operations."""
