"""Quotes: when a job would start and end, what it would cost, and whom it would delay."""
