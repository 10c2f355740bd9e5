"""A cluster on Kubernetes: what the pods of the Helm chart run beside PlexRL's own processes."""
