"""When the tensor-parallel groups of an engine change while it generates (PAT)."""
