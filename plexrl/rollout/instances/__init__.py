"""What the coordinator knows of each instance."""
