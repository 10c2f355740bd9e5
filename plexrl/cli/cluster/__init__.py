"""Commands about the cluster: start it, its nodes, tenants and usage."""
