"""`plexrl demo`: two tenants' RL jobs on one shared training group, measured against isolation."""
