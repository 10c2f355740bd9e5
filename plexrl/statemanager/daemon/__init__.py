"""The StateManager process: sessions and request handlers."""
