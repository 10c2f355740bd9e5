"""What a run comes to: figures, bounds, costs, comparisons."""
