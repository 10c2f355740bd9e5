"""Payloads and results on disk, and access to and quotas of checkpoints."""
