"""Forward passes of the built-in engine."""
