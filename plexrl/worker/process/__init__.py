"""A worker process: runs one rank's operations in the order of admission."""
