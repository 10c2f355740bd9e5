"""Traces made from other traces, from W&B exports and from live clusters."""
