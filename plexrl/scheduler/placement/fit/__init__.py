"""Whether the nodes could hold deployments at all, without placing them."""
