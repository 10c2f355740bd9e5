"""Weights pulled from a published version, over shared memory and over TCP."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.sizes import sized
from benchmarks.state.baselines import GB, MIB, Memcpy, Rounds, Seconds, Work, in_turns, iperf3
from benchmarks.state.rig import Daemon, Figures, Rank, Rows, daemon, row, tensors
from plexrl.statemanager.client.reports import PullReport
from plexrl.statemanager.layout.keys import StateSlice

TENSORS, ROWS, COLUMNS = sized((128, 1024, 1024), quick=(4, 64, 64))
"""F32, 4 MiB each."""
STATE_BYTES = TENSORS * ROWS * COLUMNS * 4
ROUNDS = sized(7, quick=1)
TRAINER, ROLLOUT = "job/actor", "job/rollout"


def measure() -> tuple[Rows, Figures]:
    """A trainer's whole state to a rollout of the same layout, and parts of it to others."""
    rows: Rows = []
    figures: Figures = {}
    with daemon(serve_tcp="127.0.0.1:0", published_versions=1) as served:
        trainer = Rank(served, _grids("F32"))
        trainer.fill()
        trainer.client.publish(seq=1, token=1)
        whole = _Target(served, "whole", _grids("F32"))
        memcpy = Memcpy(STATE_BYTES)
        works: dict[str, Work] = {
            "shm pull": lambda: whole.pull(served.config.listen),
            "memcpy": memcpy.work(2),
            "memcpy 1": memcpy.work(1),
        }
        found = in_turns(works, 2 * ROUNDS)
        _compare(rows, figures, found, "shm pull", "memcpy", "shm_pull_ratio")
        assert np.array_equal(
            np.frombuffer(whole.rank.arena.buffer, dtype=np.uint8),
            np.frombuffer(trainer.arena.buffer, dtype=np.uint8),
        ), "a pull brought other bytes than were published"
        figures["memcpy_gb_s"] = STATE_BYTES / found.best_s("memcpy") / GB
        halves = _Target(served, "halves", _halves("F32"))
        casts = _Target(served, "casts", _grids("BF16"))
        works = {
            "shm strided": lambda: halves.pull(served.config.listen),
            "shm cast": lambda: casts.pull(served.config.listen),
            "tcp pull": lambda: whole.pull(served.tcp),
            "tcp strided": lambda: halves.pull(served.tcp),
            "tcp cast": lambda: casts.pull(served.tcp),
        }
        network = iperf3(STATE_BYTES)
        if network is not None:
            works["iperf3"] = network
        found = in_turns(works, ROUNDS)
        for name in ("shm strided", "shm cast"):
            rate = STATE_BYTES / found.best_s(name) / GB
            if name == "shm strided":
                rate /= 2
            figures[f"{name.replace(' ', '_')}_gb_s"] = rate
            rows.append(row(f"{name}, bytes read", f"{rate:.1f} GB/s"))
        if network is not None:
            figures["iperf3_gb_s"] = STATE_BYTES / found.best_s("iperf3") / GB
            _compare(rows, figures, found, "tcp pull", "iperf3", "tcp_pull_ratio")
            # Both bring half of the bytes.
            _compare(rows, figures, found, "tcp strided", "iperf3", "tcp_strided_ratio", 0.5)
            _compare(rows, figures, found, "tcp cast", "iperf3", "tcp_cast_ratio", 0.5)
    found_rows, redundancy = _redundancy()
    return rows + found_rows, figures | redundancy


class _Target:
    """A rank that pulls."""

    def __init__(self, served: Daemon, name: str, slices: Sequence[StateSlice]) -> None:
        self.rank = Rank(served, slices, deployment=f"{ROLLOUT}-{name}")

    def pull(self, source: str) -> Seconds:
        return self.report([source]).seconds

    def report(self, sources: Sequence[str]) -> PullReport:
        found = self.rank.client.pull(
            sources=sources, source=TRAINER, seq=1, wants=self.rank.slices
        )
        assert found.attempts == 1, "a source was lost"
        return found


def _grids(dtype: str) -> tuple[StateSlice, ...]:
    """Whole tensors."""
    item_bytes = 4 if dtype == "F32" else 2
    return tuple(
        replace(
            piece,
            global_shape=(ROWS, COLUMNS),
            offset=(0, 0),
            shape=(ROWS, COLUMNS),
        )
        for piece in tensors(TENSORS, ROWS * COLUMNS * item_bytes, dtype=dtype)
    )


def _halves(dtype: str) -> tuple[StateSlice, ...]:
    """The right half of every tensor's columns."""
    return tuple(
        replace(
            piece,
            offset=(0, COLUMNS // 2),
            shape=(ROWS, COLUMNS // 2),
            arena_offset=piece.arena_offset // 2,
        )
        for piece in _grids(dtype)
    )


def _rows_of(index: int, ways: int) -> tuple[StateSlice, ...]:
    """One of so many parts of every tensor's rows."""
    return tuple(
        replace(
            piece,
            offset=(ROWS // ways * index, 0),
            shape=(ROWS // ways, COLUMNS),
            arena_offset=piece.arena_offset // ways,
        )
        for piece in _grids("F32")
    )


def _redundancy() -> tuple[Rows, Figures]:
    """Two nodes with a replica each of a trainer on four ranks; a rollout on two other ranks."""
    moved = wanted = 0
    by_source: dict[str, int] = {}
    options = {"serve_tcp": "127.0.0.1:0", "host_bytes": 1200 * MIB}
    with (
        daemon(**options) as first,
        daemon(**options, ticket_key_file=str(first.config.ticket_key_path)) as second,
    ):
        for served in (first, second):
            for index in range(4):
                rank = Rank(served, _rows_of(index, 4), rank=index, world_size=4)
                rank.client.publish(seq=1, token=1)
        for index in range(2):
            target = Rank(
                first, _halves("F32")[index::2], deployment=ROLLOUT, rank=index, world_size=2
            )
            report = target.client.pull(
                sources=[first.config.listen, second.config.listen],
                source=TRAINER,
                seq=1,
                wants=target.slices,
            )
            moved += report.bytes_moved
            wanted += target.nbytes
            for source, nbytes in report.bytes_by_source.items():
                by_source[source] = by_source.get(source, 0) + nbytes
    figures = {
        "pull_redundancy": moved / wanted,
        "pull_source_share_max": max(by_source.values()) / moved,
    }
    return [
        row("pull_redundancy: bytes that came for each one wanted", f"{moved / wanted}", "", "1.0"),
        row("of two sources, the share of the busier", f"{figures['pull_source_share_max']:.2f}"),
    ], figures


def _compare(
    rows: Rows,
    figures: Figures,
    found: Rounds,
    name: str,
    baseline: str,
    figure: str,
    fraction: float = 1.0,
) -> None:
    """`fraction`: of the baseline's bytes that the work brings."""
    figures[figure] = fraction * found.ratio(name, baseline)
    figures[f"{figure}_usual"] = fraction * found.usual_ratio(name, baseline)
    rate = fraction * STATE_BYTES / found.best_s(name) / GB
    value = f"{rate:.1f} GB/s, {figures[figure]:.2f}"
    rows.append(row(f"{name}, of {baseline}", value, f"{figures[f'{figure}_usual']:.2f}", "≥ 0.8"))
