"""Measures the control plane: round trips of requests, and clean-up after a killed worker.

The round trip is given beside that of a bare echo between two processes, taken in turns with it:
what is above the echo is ours. Both are pinned alike, because the cores decide most of the time: on
one core a message is a context switch, on two cores also an interrupt that wakes the other core.
"""

import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.report import percentile
from benchmarks.sizes import sized
from benchmarks.state.baselines import MIB
from benchmarks.state.rig import Daemon, Figures, Rank, Rows, daemon, row, tensors
from plexrl.statemanager.protocol.messages import Confirm

ROUNDS = sized(30, quick=1)
REQUESTS = sized(1000, quick=100)
"""In each round."""
KILLS = sized(20, quick=1)
ARENA_BYTES = sized(256 * MIB, quick=MIB)


PLACES = {"": "on one core", "_two_cores": "on two cores"}
"""Suffix of a placement's figures: what the table calls it."""


def measure() -> tuple[Rows, Figures]:
    """Round trips of a daemon at rest, then kills."""
    figures = _round_trips()
    with daemon() as served:
        cleanups = sorted(_cleanup_ms(served) for _ in range(KILLS))
    figures["kill_cleanup_ms"] = statistics.median(cleanups)
    figures["kill_cleanup_ms_max"] = cleanups[-1]
    rows = [found for place in PLACES for found in _round_trip_rows(place, figures)]
    rows.append(
        row(
            "clean-up after a worker with 256 MiB was killed",
            f"{cleanups[0]:.1f} ms",
            f"{figures['kill_cleanup_ms']:.1f}, at most {cleanups[-1]:.1f}",
            "≤ 100 ms",
        )
    )
    return rows, figures


def _round_trip_rows(place: str, figures: Figures) -> Rows:
    rows: Rows = []
    for kind, name in (("control", "request"), ("bare_echo", "bare echo")):
        quietest, usual, late = (
            figures[f"{kind}{place}_{figure}"] for figure in ("p50_us_quietest", "p50_us", "p99_us")
        )
        bar = "≤ 15 µs" if (kind, place) == ("control", "") else ""
        rows.append(row(f"{name}, p50, {PLACES[place]}", f"{quietest:.1f} µs", f"{usual:.1f}", bar))
        rows.append(row(f"{name}, p99, {PLACES[place]}", "", f"{late:.1f}"))
    return rows


def _round_trips() -> Figures:
    """Microseconds; median and 99th percentile of all requests, and the quietest round's median."""
    everywhere = os.sched_getaffinity(0)
    theirs, ours = min(everywhere), max(everywhere)
    rounds: dict[str, list[list[float]]] = {}
    # Daemon and echo inherit the core; only this process moves between the rounds.
    os.sched_setaffinity(0, {theirs})
    try:
        with daemon() as served, _echo() as bare:
            agent = served.client()
            asks: dict[str, Callable[[], object]] = {
                "bare_echo": bare,
                "control": partial(agent.request, Confirm()),
            }
            for _ in range(ROUNDS):
                for place, core in zip(PLACES, (theirs, ours), strict=True):
                    os.sched_setaffinity(0, {core})
                    for kind, ask in asks.items():
                        rounds.setdefault(kind + place, []).append(_times_us(ask))
            agent.close()
    finally:
        os.sched_setaffinity(0, everywhere)
    figures = {}
    for name, found in rounds.items():
        pooled = [time_us for times in found for time_us in times]
        figures[f"{name}_p50_us"] = percentile(pooled, 50)
        figures[f"{name}_p99_us"] = percentile(pooled, 99)
        figures[f"{name}_p50_us_quietest"] = min(percentile(times, 50) for times in found)
    return figures


@contextmanager
def _echo() -> Iterator[Callable[[], object]]:
    """A round trip to a process that gives back what it gets, and does nothing else."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        while said := theirs.recv(4096):
            theirs.sendall(said)
        os._exit(0)
    theirs.close()

    def ask() -> None:
        ours.sendall(b"x" * 16)
        ours.recv(4096)

    yield ask
    ours.close()
    os.waitpid(child, 0)


def _times_us(ask: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(REQUESTS):
        began = time.perf_counter_ns()
        ask()
        found.append((time.perf_counter_ns() - began) / 1e3)
    return found


def _cleanup_ms(served: Daemon) -> float:
    """From `kill -9` of a worker until the daemon has its arena's memory back."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        rank = Rank(served, tensors(64, ARENA_BYTES // 64))
        rank.fill()
        os.write(writer, b"r")
        signal.pause()
    os.close(writer)
    assert os.read(reader, 1) == b"r", "the worker ended early"
    os.close(reader)
    agent = served.client()
    assert agent.usage()["device"]["lent_bytes"]
    began = time.perf_counter()
    os.kill(child, signal.SIGKILL)
    while (usage := agent.usage())["deployments"] or usage["device"]["lent_bytes"]:
        time.sleep(0.0002)
    took_ms = 1e3 * (time.perf_counter() - began)
    os.waitpid(child, 0)
    agent.close()
    return took_ms
