"""The controllers of the simulated jobs."""
