"""Checkpoints: versions of a deployment as files that others load, written while it goes on."""
