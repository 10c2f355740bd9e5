"""Transfer of versions: pulls, loads under another layout, migration."""
