"""Accepted events on disk: journal, snapshots, leadership. I/O."""
