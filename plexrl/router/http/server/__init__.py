"""The HTTP server's connections and their limits."""
