"""Whether a deployment can fit at all. Pure."""
