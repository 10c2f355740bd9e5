"""Writes versions into the tiers."""
