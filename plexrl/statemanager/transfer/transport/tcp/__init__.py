"""Versions over TCP."""
