"""Measures how the rate of a checkpoint grows with the nodes that hold its state.

Each node's StateManager writes at most `RATE` bytes a second, so that this machine's disk is not
what bounds them; they reach each other over TCP, as on machines of their own. `of n times` is the
rate relative to as many times the rate of one node, measured in the same run.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.sizes import sized
from benchmarks.state.baselines import MIB
from benchmarks.state.rig import Daemon, Figures, Rank, Rows, daemon, row, tensors
from plexrl.statemanager.checkpoint.requests import (
    CheckpointState,
    CheckpointStatus,
    WriteCheckpoint,
)
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.wire.messages.node_queries import CheckpointView

NODES = sized((1, 2, 4), quick=(1, 2))
RATE = sized(50 * MIB, quick=4 * MIB)
SECONDS = sized(8, quick=1)
"""That one node alone would need."""
FILES = 32
POLL_S = 0.005


def measure() -> tuple[Rows, Figures]:
    """The rate with each number of nodes."""
    rates = {count: _rate(count) for count in NODES}
    rows, figures = [], {}
    for count, rate in rates.items():
        part = rate / (count * rates[1])
        rows.append(
            row(
                f"checkpoint by {count} nodes of {RATE / 1e6:.0f} MB/s each",
                f"{rate / 1e6:.0f} MB/s",
                f"{part:.2f} of n times",
                "" if count == 1 else "≥ 0.9",
            )
        )
        if count > 1:
            figures[f"checkpoint_of_{count}_nodes"] = part
    return rows, figures


def _rate(count: int) -> float:
    """Bytes per second."""
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="plexrl-bench-"))
        nodes = [
            held.enter_context(
                daemon(
                    node=f"node{index}",
                    checkpoint_url=str(Path(folder) / "checkpoints"),
                    checkpoint_bytes_per_s=RATE,
                    serve_tcp="127.0.0.1:0",
                    # One key, as the nodes of a cluster have it.
                    ticket_key_file=str(Path(folder) / "ticket.key"),
                )
            )
            for index in range(count)
        ]
        ranks = [
            Rank(node, _slices(index, count), rank=index, world_size=count)
            for index, node in enumerate(nodes)
        ]
        for index, rank in enumerate(ranks):
            rank.fill(index)
            rank.snapshot(1)
        return _write(ranks[0], nodes)


def _slices(rank: int, count: int) -> tuple[StateSlice, ...]:
    """Of tensors that are cut over all ranks, as FSDP cuts them."""
    nbytes = RATE * SECONDS // FILES // count // 4 * 4
    return tuple(
        replace(piece, global_shape=(count * nbytes // 4,), offset=(rank * nbytes // 4,))
        for piece in tensors(FILES, nbytes)
    )


def _write(asked: Rank, nodes: list[Daemon]) -> float:
    request = WriteCheckpoint(
        deployment=asked.deployment,
        seq=1,
        name="one",
        sources=(nodes[0].config.listen, *(node.tcp for node in nodes[1:])),
        # A tensor a file.
        shard_bytes_max=1,
    )
    asked.client.request(request)
    while True:
        status = CheckpointStatus(deployment=asked.deployment, name="one")
        (plain,) = asked.client.request(status)["checkpoints"]
        found = msgspec.convert(plain, CheckpointView)
        if CheckpointState(found["state"]).is_final:
            assert found["state"] == CheckpointState.DURABLE, found
            return found["bytes_total"] / found["seconds"]
        time.sleep(POLL_S)
