"""The versions that a node stores, and the tiers that they are stored in."""
