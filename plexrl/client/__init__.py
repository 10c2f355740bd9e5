"""The SDK: what a controller imports; no torch."""
