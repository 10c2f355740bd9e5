"""Health, metrics and traces of the router."""
