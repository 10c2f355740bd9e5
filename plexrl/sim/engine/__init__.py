"""The virtual clock and what runs on it."""
