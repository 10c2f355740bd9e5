"""The profile of a rollout engine: what is measured, and how."""
