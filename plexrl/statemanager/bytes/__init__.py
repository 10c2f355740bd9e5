"""Moves bytes between memory, files and devices. It knows neither versions nor sockets."""
