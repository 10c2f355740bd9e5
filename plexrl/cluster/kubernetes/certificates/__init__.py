"""Keys and certificates of a cluster on Kubernetes: made once, issued to pods, renewed by them."""
