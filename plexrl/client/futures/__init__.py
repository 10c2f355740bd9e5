"""Futures: results of submitted operations."""
