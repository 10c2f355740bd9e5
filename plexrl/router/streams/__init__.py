"""Token streams of generations."""
