"""The host tier's memory."""
