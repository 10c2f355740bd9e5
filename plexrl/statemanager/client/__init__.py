"""The StateManager as a worker sees it."""
