"""A rank whose optimizer's state is in host memory, as a worker has it, and one in a process of its
own, to be killed."""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.wire.messages import SaveRequest
from tests.statemanager.conftest import ALL_PARTS, DEADLINE_S, Daemon

ELEMENTS = 64 * 1024


class HostShard:
    """A parameter in an arena, and its moment in host memory; `step` changes both."""

    def __init__(
        self,
        daemon: Daemon,
        *,
        deployment: str = "job/actor",
        elements: int = ELEMENTS,
        token: int = 1,
        timeout_s: float = DEADLINE_S,
        **claims: Any,
    ) -> None:
        self.token = token
        nbytes = elements * 4
        start = host_start(nbytes)
        self.slices = tuple(
            StateSlice(
                key=StateKey(part=part, name=name),
                dtype="F32",
                global_shape=(elements,),
                offset=(0,),
                shape=(elements,),
                arena_offset=place,
            )
            for part, name, place in (
                (StatePart.PARAMETER, "w", 0),
                (StatePart.OPTIMIZER, "w/exp_avg", start),
            )
        )
        self.arena, self.host = Arena(nbytes), HostArena(nbytes)
        fields = {"rank": 0, "world_size": 1, "job": deployment.split("/")[0], **claims}
        self.client = StateManagerClient(
            daemon.config.listen,
            deployment=deployment,
            rank=0,
            world_size=1,
            ticket=daemon.ticket(role="worker", deployment=deployment, **fields),
            timeout_s=timeout_s,
        )

    def register(self) -> None:
        self.client.register(self.arena, self.slices, group="g", token=self.token, host=self.host)

    @property
    def parameter(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.arena.buffer, dtype=np.float32)

    @property
    def moment(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.host.buffer, dtype=np.float32)

    def step(self) -> None:
        """One more than before, everywhere."""
        with self.host.writing() as at:
            target = _floats(at.target, self.host.nbytes)
            target[:] = _floats(at.source, self.host.nbytes) + 1
            self.parameter[:] += 1

    def is_after(self, steps: int) -> bool:
        """Whether every element of both is what so many steps make of zero."""
        return bool((self.parameter == steps).all() and (self.moment == steps).all())

    def offload(self, seq: int, keep_seq: int = 0) -> int:
        report = self.client.offload(
            SaveRequest(seq=seq, keep_seq=keep_seq, token=self.token), parts=ALL_PARTS
        )
        return report.bytes_moved

    def snapshot(self, seq: int, keep_seq: int = 0) -> int:
        report = self.client.snapshot(
            SaveRequest(seq=seq, keep_seq=keep_seq, token=self.token), parts=ALL_PARTS
        )
        return report.bytes_moved

    def load(self, seq: int) -> int:
        return self.client.load(seq=seq, token=self.token).bytes_moved

    def close(self) -> None:
        self.client.close()
        self.host.detach()
        self.arena.close()


def _floats(address: int, nbytes: int) -> npt.NDArray[np.float32]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_float * (nbytes // 4)).from_address(address))


def train_until_killed(daemon: Daemon, elements: int, first: int, said: Connection) -> None:
    """Step, and store every second step as a version, for ever: `said` hears which are whole."""
    shard = HostShard(daemon, elements=elements)
    shard.register()
    if first:
        shard.load(first)
    seq = first
    while True:
        shard.step()
        shard.step()
        seq += 2
        if seq % 4:
            shard.snapshot(seq, keep_seq=seq - 2)
        else:
            shard.offload(seq, keep_seq=seq - 2)
            shard.load(seq)
        said.send(seq)


def start_training(
    daemon: Daemon, elements: int, first: int
) -> tuple[multiprocessing.Process, Connection]:
    """A process that trains from version `first` on (0: from zeros), and what it says."""
    hears, says = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=train_until_killed, args=(daemon, elements, first, says))
    process.start()
    says.close()
    return process, hears  # type: ignore[return-value]
