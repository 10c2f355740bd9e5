"""Versions of a deployment's state: format, location, changes and leases."""
