"""The memory that a worker's tensors live in, which it borrows from its node's StateManager.

The range of addresses is the worker's for good; what is behind them comes with a registration or a
load, and goes with an offload (`plexrl.statemanager.device.backend`).
"""

from plexrl.statemanager.device.cpu.arena import CpuArena as Arena

__all__ = ["Arena"]
