"""The report of simulated rollouts: one self-contained HTML page."""
