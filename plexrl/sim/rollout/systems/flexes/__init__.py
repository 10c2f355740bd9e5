"""Flexes on the virtual clock: rounds, rewards beside generation, the stream trainer."""
