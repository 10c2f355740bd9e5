"""What instances have, what is on its way to them, and what they will show."""
