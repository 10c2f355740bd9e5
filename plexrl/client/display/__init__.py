"""What the SDK shows to people."""
