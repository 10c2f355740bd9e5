"""The coordinator's knowledge of each instance."""
