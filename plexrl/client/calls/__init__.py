"""Requests of the SDK to a router."""
