"""Pure eviction policy: which versions leave a tier, and the tenants' limits."""
