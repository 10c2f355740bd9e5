"""The systems that are compared: decisions on routing, updates and batches."""
