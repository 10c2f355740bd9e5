"""Jobs of a trace, read once and shared by runs."""
