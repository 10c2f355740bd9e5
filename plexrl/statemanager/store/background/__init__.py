"""Threads that move versions between tiers ahead of need."""
