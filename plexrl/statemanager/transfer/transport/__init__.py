"""Transports to the bytes of a published version: shared memory, TCP, RDMA."""

from plexrl.statemanager.transfer.transport.source import OpenSource, Shard, Transport

__all__ = ["OpenSource", "Shard", "Transport"]
