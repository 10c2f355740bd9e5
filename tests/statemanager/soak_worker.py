"""A worker process of the soak: carries out moves of one rank and compares every byte."""

import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from plexrl.errors import PlexRLError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.protocol.network import Network
from plexrl.wire.messages import SaveRequest
from tests.statemanager.conftest import ALL_PARTS

ELEMENTS = 64 * 1024
PARAMETER_BYTES = 4 * ELEMENTS
STATE_BYTES = 2 * PARAMETER_BYTES
TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a worker is."""

    path: str
    """Of its StateManager's socket."""
    deployment: str
    rank: int
    world_size: int
    ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a worker is to do."""

    what: str
    """`offload`, `snapshot`, `load`, `publish`, `pull` or `close`."""
    seq: int = 0
    keep_seq: int = 0
    source: str = ""
    sources: tuple[str, ...] = ()
    delta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    error: str = ""
    """Its code; empty: it was done."""
    message: str = ""
    exact: bool = True
    """What was loaded or pulled is the version that was asked for, bit by bit."""


def version(deployment: str, seq: int) -> Bytes:
    """Bits of a version, the same for all ranks, which are replicas; never those of another."""
    seed = [zlib.crc32(deployment.encode()), seq]
    return np.random.default_rng(seed).integers(0, 256, STATE_BYTES, dtype=np.uint8)


def slices() -> tuple[StateSlice, ...]:
    """Of every rank: a parameter and its optimizer state, whole."""
    return tuple(
        StateSlice(
            key=StateKey(part=part, name=name),
            dtype="F32",
            global_shape=(ELEMENTS,),
            offset=(0,),
            shape=(ELEMENTS,),
            arena_offset=index * PARAMETER_BYTES,
        )
        for index, (part, name) in enumerate(
            ((StatePart.PARAMETER, "w"), (StatePart.OPTIMIZER, "w/exp_avg"))
        )
    )


class Worker:
    """One rank."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._slices = slices()
        self._arena = Arena(STATE_BYTES)
        self._contents: Bytes = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        self._client = StateManagerClient(
            identity.path,
            deployment=identity.deployment,
            rank=identity.rank,
            world_size=identity.world_size,
            ticket=identity.ticket,
            timeout_s=TIMEOUT_S,
            network=Network(is_trusted=True),
        )
        self._client.register(self._arena, self._slices, group=identity.deployment, token=1)

    def carry_out(self, command: Command) -> Outcome:
        """Raises what the client does."""
        client, seq, name = self._client, command.seq, self._identity.deployment
        match command.what:
            case "offload" | "snapshot":
                np.copyto(self._contents, version(name, seq))
                save = client.offload if command.what == "offload" else client.snapshot
                order = SaveRequest(seq=seq, keep_seq=command.keep_seq, token=1)
                save(order, parts=ALL_PARTS)
                return Outcome()
            case "publish":
                np.copyto(self._contents, version(name, seq))
                client.publish(seq=seq, token=1)
                return Outcome()
            case "load":
                client.load(seq=seq, token=1)
                return Outcome(exact=bool(np.array_equal(self._contents, version(name, seq))))
            case "pull":
                client.pull(
                    sources=command.sources,
                    source=command.source,
                    seq=seq,
                    wants=self._slices[:1],
                    delta=DeltaPolicy() if command.delta else None,
                )
                expected = version(command.source, seq)[:PARAMETER_BYTES]
                return Outcome(
                    exact=bool(np.array_equal(self._contents[:PARAMETER_BYTES], expected))
                )
        raise AssertionError(command)

    def close(self) -> None:
        """Leave as a worker that has done its work does."""
        self._client.close()
        self._arena.close()


def work(pipe: Connection, identity: Identity) -> None:
    """Take commands from the pipe and answer each, until `close` or the pipe's end."""
    worker = Worker(identity)
    pipe.send(Outcome())
    while True:
        try:
            command: Command = pipe.recv()
        except EOFError:
            return
        if command.what == "close":
            worker.close()
            return
        try:
            outcome = worker.carry_out(command)
        except PlexRLError as error:
            outcome = Outcome(error=error.code, message=error.message)
        pipe.send(outcome)
