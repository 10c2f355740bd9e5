"""The scheduler process: sockets, clock, commands. I/O."""
