"""Starts and supervises the processes of a cluster, on this machine or on Ray nodes."""
