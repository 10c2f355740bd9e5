"""Read-only views and explanations of the state. Pure."""
