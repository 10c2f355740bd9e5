"""StateManagers and nodes of the simulated cluster."""
