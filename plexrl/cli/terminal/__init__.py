"""How commands find their cluster and write to a terminal."""
