"""Which groups a deployment may join, and which of them it does."""
