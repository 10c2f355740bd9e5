"""Commands that show the cluster: its state, what is wrong, its use, its events."""
