"""Parts of `benchmarks/execution.py`: a router whose workers answer at once, and its clients."""
