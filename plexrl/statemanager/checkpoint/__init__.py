"""Checkpoints: versions of a deployment as files, written in the background."""
