"""The rollout coordinator: snapshots and events in, commands out."""
