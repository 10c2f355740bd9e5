"""The rollout deployments of a rollout: who is in it, what each one does, and its commands."""
