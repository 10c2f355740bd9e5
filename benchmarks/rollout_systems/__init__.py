"""Asynchronous systems of other papers, simulated beside `staleflow`."""
