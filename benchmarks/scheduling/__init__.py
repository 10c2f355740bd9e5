"""Parts of `benchmarks/scheduler.py`."""
