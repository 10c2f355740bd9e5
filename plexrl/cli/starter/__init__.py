"""`plexrl init`: writes a starter project."""
