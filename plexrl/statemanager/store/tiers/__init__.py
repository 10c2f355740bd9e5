"""The host and NVMe tiers: memory, files, quotas, eviction, and moves between the two."""
