"""Versions on their way: pulls, re-layouts, migration."""
