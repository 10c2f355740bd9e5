"""Streams of generated tokens."""
