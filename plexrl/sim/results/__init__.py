"""Results of runs: figures, bounds, costs and comparisons."""
