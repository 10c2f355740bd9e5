"""Whole objects in a store that all machines reach, by URL."""
