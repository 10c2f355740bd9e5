"""Who is busy when, on which GPUs. Pure."""
