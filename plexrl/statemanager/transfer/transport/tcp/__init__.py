"""Transport of versions over TCP."""
