"""State of a worker in host memory: optimizer, staging, transfers."""
