"""`plexrl simulate`."""
