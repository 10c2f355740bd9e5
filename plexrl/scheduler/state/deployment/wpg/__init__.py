"""A WPG: its state, processes, moves, and stored version. Pure."""
