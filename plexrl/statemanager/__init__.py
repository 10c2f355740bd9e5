"""The StateManager: one daemon per node, the only authority on where model state lies.

Import names from the modules: the simulator uses only the eviction policy, without the client and
the transports.
"""
