"""From a batch to what every rank is sent, and back. Pure."""
