"""Executes admitted operations on workers."""
