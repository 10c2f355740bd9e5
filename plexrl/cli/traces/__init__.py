"""`plexrl traces`, `plexrl fidelity` and `plexrl forecast`."""
