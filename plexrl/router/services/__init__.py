"""What all routes use, and who calls."""
