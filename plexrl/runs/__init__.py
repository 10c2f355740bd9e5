"""Controllers that run on the cluster: their files and records, and the service that keeps them."""
