"""Formulas and policies: numbers in, numbers out. Nothing here changes the state."""
