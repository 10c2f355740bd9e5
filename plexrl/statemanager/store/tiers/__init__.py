"""Space in the host and NVMe tiers: quotas, reservations, and moves between the two."""
