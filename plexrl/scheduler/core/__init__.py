"""The core's one entry point, its events and its commands. Pure."""
