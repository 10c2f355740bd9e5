"""Trajectories: the record of each one, its states, and the trajectory server's core."""
