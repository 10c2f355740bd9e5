"""What models are made of: the table of families, and sizes from a configuration. Pure."""
