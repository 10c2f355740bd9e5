"""A rank on a simulated host: `python -m tests.statemanager.hosts.rank JSON`.

Orders come on standard input, one a line. Each is answered by one line, `answer NUMBER JSON`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plexrl.errors import PlexRLError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.migration import migrate
from plexrl.statemanager.layout.keys import DTYPE_BYTES, StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import AGENT, Claims, Role, job_of
from plexrl.wire.links.credentials import TlsFiles
from plexrl.wire.messages import SaveRequest

Bytes = npt.NDArray[np.uint8]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Who the rank is, and its part of the model."""

    listen: str
    """Socket of its StateManager."""
    key_file: str
    deployment: str
    rank: int
    world_size: int
    tensors: int
    rows: int
    columns: int
    split: int | None
    """Dimension by which the ranks divide each tensor; absent: each has all."""
    dtype: str = "F32"
    optimizer: bool = False
    """Whether the tensors are state of the optimizer, which is saved and loaded, not published."""
    fabric: str = ""
    tls: TlsFiles | None = None
    timeout_s: float = 60.0
    digests: bool = False
    """Whether a pull reports the SHA-256 of the rank's memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's part."""
        return self.tensors * self.rows * self.columns * DTYPE_BYTES[self.dtype] // self.parts

    @property
    def parts(self) -> int:
        return 1 if self.split is None else self.world_size

    def slices(self) -> tuple[StateSlice, ...]:
        shape = [self.rows, self.columns]
        offset = [0, 0]
        if self.split is not None:
            shape[self.split] //= self.parts
            offset[self.split] = self.rank * shape[self.split]
        nbytes = shape[0] * shape[1] * DTYPE_BYTES[self.dtype]
        part = StatePart.OPTIMIZER if self.optimizer else StatePart.PARAMETER
        return tuple(
            StateSlice(
                key=StateKey(part=part, name=f"layer{index}.weight"),
                dtype=self.dtype,
                global_shape=(self.rows, self.columns),
                offset=(offset[0], offset[1]),
                shape=(shape[0], shape[1]),
                arena_offset=index * nbytes,
            )
            for index in range(self.tensors)
        )


class Rank:
    """Carries out orders."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._key = read_ticket_key(Path(setup.key_file))
        self._network = Network.of(setup.tls, setup.fabric)
        claims = Claims(
            role=Role.WORKER,
            job=job_of(setup.deployment),
            deployment=setup.deployment,
            rank=setup.rank,
            world_size=setup.world_size,
        )
        self._slices = setup.slices()
        self._arena = Arena(setup.nbytes)
        self._client = StateManagerClient(
            setup.listen,
            deployment=setup.deployment,
            rank=setup.rank,
            world_size=setup.world_size,
            ticket=self._key.mint(claims),
            timeout_s=setup.timeout_s,
            network=self._network,
        )
        self._client.register(self._arena, self._slices, group=setup.deployment, token=1)

    def obey(self, order: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Carry out an order; a typed error is the answer to one that fails."""
        began = time.monotonic()
        try:
            answer: dict[str, Any] = getattr(self, order)(**arguments)
        except PlexRLError as error:
            answer = {"error": error.code, "message": error.message}
        return {"began": began, "ended": time.monotonic(), **answer}

    def publish(self, seq: int, file: str = "") -> dict[str, Any]:
        """Publish version `seq`: what a file holds, or what `check` expects."""
        if file:
            self._memory()[:] = np.fromfile(file, dtype=np.uint8)
        else:
            self._fill(seq)
        self._client.publish(seq=seq, token=1)
        return {}

    def pull(
        self,
        seq: int,
        sources: list[str],
        source: str,
        *,
        delta: bool | str = False,
        replicate: bool = False,
    ) -> dict[str, Any]:
        """Pull version `seq`: the changes since the last pull, or everything into empty memory, or
        with `delta` "auto" what was quicker lately. With `replicate` from a replica here, if that
        saves bytes."""
        if not delta:
            self._memory()[:] = 0
        began = time.monotonic()
        report = self._client.pull(
            sources=sources,
            source=source,
            seq=seq,
            wants=self._slices,
            delta=DeltaPolicy(only_where_quicker=delta == "auto") if delta else None,
            replicate=replicate,
        )
        ended = time.monotonic()
        return {
            "began": began,
            "ended": ended,
            "moved": report.bytes_moved,
            "wanted": report.bytes_wanted,
            "replicated": report.bytes_replicated,
            "by_source": report.bytes_by_source,
            "attempts": report.attempts,
            "mode": report.mode.value,
            "digest": hashlib.sha256(self._memory().tobytes()).hexdigest()
            if self._setup.digests
            else "",
        }

    def prefetch(self, seq: int, sources: list[str], source: str) -> dict[str, Any]:
        """As this node's agent: have the node fetch a version that its ranks will pull; returns
        when it is here."""
        with closing(self._agent()) as agent:
            agent.prefetch(source, seq, sources=sources)
            while True:
                versions = agent.usage()["deployments"].get(source, {}).get("versions", [])
                if any(each["seq"] == seq for each in versions):
                    return {}
                time.sleep(0.001)

    def check(self, seq: int) -> dict[str, Any]:
        """Whether every element is that of version `seq`."""
        return {"holds": all(np.array_equal(*pair) for pair in self._pairs(seq))}

    def save(self, seq: int) -> dict[str, Any]:
        self._fill(seq)
        part = self._slices[0].key.part
        self._client.offload(SaveRequest(seq=seq, token=1), parts=frozenset({part}))
        return {}

    def load(self, seq: int) -> dict[str, Any]:
        self._client.load(seq=seq, token=1)
        return {}

    def migrate(self, seq: int, sources: list[str], ranks: list[int]) -> dict[str, Any]:
        """As this node's agent."""
        report = migrate(
            sources,
            self._setup.listen,
            deployment=self._setup.deployment,
            seq=seq,
            ticket=self._key.mint(AGENT),
            network=self._network,
            ranks=ranks,
            timeout_s=self._setup.timeout_s,
        )
        return {"moved": report.bytes_moved}

    def _agent(self) -> StateManagerClient:
        return StateManagerClient(
            self._setup.listen,
            deployment="",
            rank=0,
            world_size=1,
            ticket=self._key.mint(AGENT),
            timeout_s=self._setup.timeout_s,
        )

    def _memory(self) -> Bytes:
        return np.frombuffer(self._arena.buffer, dtype=np.uint8)

    def _fill(self, seq: int) -> None:
        for held, expected in self._pairs(seq):
            held[...] = expected

    def _pairs(self, seq: int) -> Any:
        """(memory, expected elements) of each tensor: an element says its place and version."""
        memory = self._memory()
        columns = self._setup.columns
        for index, piece in enumerate(self._slices):
            flat = memory[piece.arena_offset : piece.arena_offset + piece.nbytes]
            rows = np.arange(piece.offset[0], piece.offset[0] + piece.shape[0], dtype=np.uint32)
            cells = np.arange(piece.offset[1], piece.offset[1] + piece.shape[1], dtype=np.uint32)
            first = np.uint32(index * self._setup.rows * columns + seq * 7919)
            yield (
                flat.view(np.uint32).reshape(piece.shape),
                rows[:, None] * np.uint32(columns) + cells[None, :] + first,
            )


def main() -> None:
    """Obey until standard input ends."""
    rank = Rank(msgspec.json.decode(sys.argv[1], type=Setup))
    sys.stdout.write("answer 0 {}\n")
    sys.stdout.flush()
    for number, line in enumerate(sys.stdin, start=1):
        words = json.loads(line)
        answer = rank.obey(words.pop("order"), words)
        sys.stdout.write(f"answer {number} {json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
