"""HTTP connections: their limits, request limits and shutdown."""
