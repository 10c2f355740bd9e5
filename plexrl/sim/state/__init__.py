"""The simulated StateManagers: node types, move costs and the location of each state."""
