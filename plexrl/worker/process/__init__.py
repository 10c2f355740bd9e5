"""One worker process: one rank's operations, in the order of admission."""
