"""The `fsdp` training backend."""
