"""The inputs of a run: scenarios, job sources, cycle distributions, policies."""
