"""Payloads and results on disk, and quotas of checkpoints."""
