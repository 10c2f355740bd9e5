"""Room in a tier: what is evicted, promoted, prefetched or refused."""
