"""One revision per file, in order of their numbers; there are no downgrades."""
