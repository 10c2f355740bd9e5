"""A live cluster's history, predicted by the simulator from itself or from other runs."""
