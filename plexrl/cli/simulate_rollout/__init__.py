"""`plexrl simulate-rollout`."""
