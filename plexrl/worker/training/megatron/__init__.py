"""The `megatron` training backend; its modules import megatron-core."""
