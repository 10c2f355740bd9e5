"""Health and counters of the daemon, and its HTTP server."""
