"""Parts of `benchmarks/simulator.py`."""
