"""Measures of a run, taken while it runs, in bounded memory."""
