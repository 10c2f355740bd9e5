"""OpenAI-compatible endpoints of rollout deployments."""
