"""Receives versions of other nodes, whole or in part."""
