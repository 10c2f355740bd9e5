"""Trace schema, loaders, generator and recorder. Empty so far."""
