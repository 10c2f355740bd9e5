"""Tail batching: its rounds, and how much a short round starts beyond what is trained."""
