"""Device memory of ranks: who holds it, and what is prefetched into it."""
