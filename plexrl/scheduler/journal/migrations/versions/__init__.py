"""One revision a file, in the order of their numbers; there is no way down."""
