"""One operation, from submission to history. Pure."""
