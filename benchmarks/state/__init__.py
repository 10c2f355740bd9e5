"""Parts of `benchmarks/statemanager.py`, each measured beside a plain baseline."""
