"""What a worker is told, and what each backend offers."""
