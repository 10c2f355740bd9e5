"""Payloads and results on disk, and the admission of uploads."""
