"""Strategies of the coordinator: routing, synchronisation, migration, and their vanilla forms."""
