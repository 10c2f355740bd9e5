"""Which waiting deployment gets GPUs next. Pure."""
