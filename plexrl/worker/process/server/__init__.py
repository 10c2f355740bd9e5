"""The socket that a worker serves."""
