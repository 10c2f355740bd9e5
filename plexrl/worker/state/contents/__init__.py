"""What an arena holds, as its device computes it."""
