"""What runs have done: histories, figures, gains."""
