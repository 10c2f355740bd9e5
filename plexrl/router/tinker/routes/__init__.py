"""Routes of the Tinker API, by subject."""
