"""Which GPUs a deployment gets, and when it moves. Pure."""
