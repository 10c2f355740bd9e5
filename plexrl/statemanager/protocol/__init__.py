"""What workers, agents and StateManagers say to each other."""
