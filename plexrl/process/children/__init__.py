"""Starts, watches and restarts child processes."""
