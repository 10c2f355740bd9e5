"""Health, metrics and counters of the daemon."""
