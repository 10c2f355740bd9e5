"""A live cluster's history, predicted by the simulator."""
