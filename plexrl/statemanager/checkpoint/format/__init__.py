"""Contents of a checkpoint's files. Pure."""
