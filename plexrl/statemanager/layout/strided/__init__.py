"""Copies of boxes of tensors, as strided runs of bytes."""
