"""Jobs, their controllers and deployments. Pure."""
