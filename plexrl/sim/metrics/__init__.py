"""Metrics of a run, collected while it runs, in bounded memory."""
