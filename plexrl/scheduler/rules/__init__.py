"""Formulas, policies and settings. Nothing here changes the state but what it measures. Pure."""
