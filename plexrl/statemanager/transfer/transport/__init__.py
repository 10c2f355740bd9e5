"""Transports to the bytes of a version: this daemon's memory, shared memory, TCP, RDMA."""
