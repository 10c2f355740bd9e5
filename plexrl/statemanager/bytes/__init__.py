"""Bytes between arena, host segments and NVMe."""
