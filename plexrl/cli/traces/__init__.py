"""`plexrl traces` and `plexrl fidelity`."""
