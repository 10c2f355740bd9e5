"""Layouts of tensors in memory, and plans that move bytes between two layouts. Pure."""
