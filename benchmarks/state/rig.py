"""Real StateManager daemons and ranks with real arenas for the measurements."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.state.baselines import MIB
from plexrl.process.memory.tuning import tuned
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.reports import LoadReport, MoveReport
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.memory import DeviceMemory, Run
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.layout import lay_out
from plexrl.statemanager.layout.versions import Manifest, VersionKind
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import AGENT, Claims, Role, job_of
from plexrl.wire.messages import SaveRequest

Rows = list[tuple[str, ...]]
Figures = dict[str, float]
PARTS = frozenset({StatePart.PARAMETER, StatePart.OPTIMIZER})
GROUP = "g"


@contextmanager
def folders(**changes: Any) -> Iterator[StateManagerConfig]:
    """A configuration whose directories are there for as long as the block runs."""
    with ExitStack() as made:
        folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="plexrl-bench-")))
        host = made.enter_context(
            tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir="/dev/shm")
        )
        fields: dict[str, Any] = {
            "node": "bench",
            "listen": str(folder / "s"),
            "host_dir": f"{host}/host",
            "host_bytes": 4096 * MIB,
            "nvme_dir": str(folder / "nvme"),
            "nvme_bytes": 8192 * MIB,
            "checkpoint_url": str(folder / "checkpoints"),
            "fabric": "trusted",
            "persist_on_exit": False,
        }
        yield StateManagerConfig(**{**fields, **changes})


@contextmanager
def daemon(**changes: Any) -> Iterator["Daemon"]:
    """One that serves, started as the launcher starts it."""
    with folders(**changes) as config:
        text = msgspec.json.encode(config).decode()
        command = [sys.executable, "-m", "plexrl.statemanager", "--config-json", text]
        command.append("--end-with-parent")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=tuned(os.environ))
        with process:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            try:
                yield Daemon(config, tcp=ready.get("serve_tcp", ""))
            finally:
                process.terminate()
                process.wait()


class Daemon:
    """A running one."""

    def __init__(self, config: StateManagerConfig, tcp: str) -> None:
        self.config = config
        self.tcp = tcp
        """Where other nodes would read."""

    def client(self, claims: Claims = AGENT) -> StateManagerClient:
        """One with a ticket that says `claims`."""
        return StateManagerClient(
            self.config.listen,
            deployment=claims.deployment,
            rank=claims.rank,
            world_size=claims.world_size,
            ticket=read_ticket_key(self.config.ticket_key_path).mint(claims),
            timeout_s=60.0,
            network=Network(is_trusted=True),
        )


class Rank:
    """One rank of a deployment as a worker has it."""

    def __init__(
        self,
        served: Daemon,
        slices: Sequence[StateSlice],
        *,
        deployment: str = "job/actor",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.slices = tuple(slices)
        self.nbytes = sum(piece.nbytes for piece in slices)
        self.deployment = deployment
        self.arena = Arena(max(piece.arena_offset + piece.nbytes for piece in slices))
        claims = Claims(
            role=Role.WORKER,
            job=job_of(deployment),
            deployment=deployment,
            rank=rank,
            world_size=world_size,
        )
        self.client = served.client(claims)
        self.client.register(self.arena, self.slices, group=GROUP, token=1)

    def fill(self, seed: int = 1) -> None:
        """Random bytes everywhere."""
        contents = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        contents[:] = np.random.default_rng(seed).integers(0, 256, contents.size, dtype=np.uint8)

    def change(self) -> None:
        """Change every word, as an optimizer step does."""
        words = np.frombuffer(self.arena.buffer, dtype=np.uint32)
        np.add(words, 1, out=words)

    def snapshot(self, seq: int) -> MoveReport:
        """Store version `seq`, the one before it given up."""
        return self.client.snapshot(SaveRequest(seq=seq, keep_seq=seq, token=1), parts=PARTS)

    def offload(self, seq: int, successor: tuple[str, int] = ("", 0)) -> MoveReport:
        """As `snapshot`, and the memory is given back. `successor`: what is loaded next."""
        deployment, version = successor
        order = SaveRequest(
            seq=seq, keep_seq=seq, token=1, successor=deployment, successor_seq=version
        )
        return self.client.offload(order, parts=PARTS)

    def load(self, seq: int) -> LoadReport:
        """Bring version `seq` back."""
        return self.client.load(seq=seq, token=1)


def fill_randomly(memory: DeviceMemory, nbytes: int, seed: int = 1) -> None:
    """Write random bytes, which neither a file system nor a disk can shorten."""
    contents = np.random.default_rng(seed).bytes(nbytes)
    memory.write([Run(0, np.frombuffer(contents, dtype=np.uint8).ctypes.data, nbytes)])


def tensors(
    count: int,
    nbytes: int,
    *,
    apart_bytes: int = 0,
    part: StatePart = StatePart.PARAMETER,
    dtype: str = "F32",
) -> tuple[StateSlice, ...]:
    """So many tensors of `nbytes` each, one after the other or with gaps between them."""
    item_bytes = {"F32": 4, "BF16": 2}[dtype]
    return tuple(
        StateSlice(
            key=StateKey(part=part, name=f"layer{index}.weight"),
            dtype=dtype,
            global_shape=(nbytes // item_bytes,),
            offset=(0,),
            shape=(nbytes // item_bytes,),
            arena_offset=index * (nbytes + apart_bytes),
        )
        for index in range(count)
    )


def row(what: str, value: str, usual: str = "", bar: str = "") -> tuple[str, ...]:
    """A line of the table."""
    return (what, value, usual, bar)


def manifest_of(slices: tuple[StateSlice, ...]) -> Manifest:
    """Version 1 of a rank that has nothing but these."""
    layout = lay_out(slices)
    return Manifest(
        deployment="job/actor",
        rank=0,
        world_size=1,
        seq=1,
        kind=VersionKind.STATE,
        parts=tuple(sorted({piece.key.part for piece in slices})),
        meta_json="{}",
        slices=slices,
        extents=layout.extents,
        nbytes=layout.nbytes,
        sections=layout.sections,
    )
