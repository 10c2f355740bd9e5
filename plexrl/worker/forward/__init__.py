"""The backend of forward-only deployments."""
