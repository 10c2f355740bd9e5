"""Requests of other nodes over TCP."""
