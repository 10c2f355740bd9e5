"""Failures of nodes and workers: when they happen, and how a run meets them."""
