"""The embedded cluster: every part as a local process."""
