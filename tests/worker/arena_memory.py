"""The memory of an arena that this process can address."""

from plexrl.statemanager.device.backend import WorkerArena
from plexrl.worker.state.arena_tensors import host_memory


def memory_of(arena: WorkerArena) -> memoryview:
    found = host_memory(arena)
    assert found is not None, "the arena is on a GPU"
    return found
