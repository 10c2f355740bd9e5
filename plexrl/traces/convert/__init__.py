"""Conversion: from live clusters, from W&B exports, and between traces."""
