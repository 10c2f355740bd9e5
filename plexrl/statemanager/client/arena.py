"""Arena: the memory of a worker's tensors, borrowed from its node's StateManager.

Its addresses never change. Its memory is borrowed by a registration or a load, and returned by an
offload (`plexrl.statemanager.device.backend`).
"""

from plexrl.statemanager.device.cpu.arena import CpuArena as Arena

__all__ = ["Arena"]
