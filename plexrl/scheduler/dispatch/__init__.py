"""What a node group runs next, and when it switches. Pure."""
