"""Results that are yet to come."""
