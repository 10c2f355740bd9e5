"""Pure eviction policy: which versions leave a tier."""
