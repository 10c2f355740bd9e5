"""Latencies of engines and training on kinds of GPU, for the simulator and for paced workers."""
