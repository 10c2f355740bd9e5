"""The data directory of a cluster: its lock, the endpoint of the cluster on it, its ports."""
