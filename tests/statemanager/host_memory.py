"""An arena in this process, as `DeviceMemory` for the store."""

from collections.abc import Sequence

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.device.mapping import move
from plexrl.statemanager.device.memory import ByteRun


class HostMemory:
    """Implements `DeviceMemory` over an arena of this process."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.nbytes = arena.nbytes

    def read(self, runs: Sequence[ByteRun]) -> None:
        for run in runs:
            assert 0 <= run.offset <= self.nbytes - run.nbytes
            move(run.address, self._arena.address + run.offset, run.nbytes)

    def write(self, runs: Sequence[ByteRun]) -> None:
        for run in runs:
            assert 0 <= run.offset <= self.nbytes - run.nbytes
            move(self._arena.address + run.offset, run.address, run.nbytes)
