"""The `megatron` training framework; its modules import megatron-core."""
