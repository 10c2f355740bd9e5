"""Clients of the daemon, and which of them may still write."""
