"""The host tier's memory: pool, segments, and allocations of workers."""
