"""The trace-replay simulator: the scheduler's core under a virtual clock. Empty so far."""
