"""Which samples will be long, and which instances generate those (StreamRL §5)."""
