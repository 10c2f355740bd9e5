"""Admitted operations, carried out on workers."""
