"""The StateManager: a daemon per node, the only authority over where model state lies.

Names are imported from its modules: the simulator wants its rule of placement (`residency`) and
neither its client nor its transports.
"""
