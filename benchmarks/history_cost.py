"""What the archive of the journal costs for each operation: bytes and bytecodes.

    python -m benchmarks.history_cost [--quick] [--json]

Two jobs take turns on a group; ids, payload names, digests and durations are random, and each
operation has a result of some numbers. Counts, no times: bytes by kind of file, bytecodes on the
scheduler's thread (in steps between two events) and on the archive's own thread. There the
uncompressed bytes go through zlib, too, which holds no lock of the interpreter.
"""

import asyncio
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec.structs import replace

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.ids import BlobRef, OperationId
from plexrl.scheduler.service.journal.history.event_files import decode_events
from plexrl.scheduler.service.journal.history.pieces import EVENTS, RUNS, STATE
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.service.journal.history.archived_cluster import ArchivedCluster

ROUNDS = sized(4000, quick=20)
"""Each of two operations; as many operations as one default snapshot replaces, or so."""
COUNTED = sized(300, quick=10)
"""Rounds of which bytecodes are counted."""


class BusyCluster(ArchivedCluster):
    """Operations with ids, digests and results as in service."""

    chance = random.Random(7)

    def pass_time(self, seconds: float) -> None:
        """Not quite so much."""
        super().pass_time(seconds * self.chance.uniform(0.5, 1.5))

    def send(self, event: ev.Event) -> list[Any]:
        if isinstance(event, ev.OperationFinished):
            numbers = [self.chance.random() for _ in range(6)]
            named = zip(("loss", "kl", "entropy", "norm", "reward", "clip"), numbers, strict=True)
            text = ",".join(f'"{name}":{number}' for name, number in named)
            event = replace(event, result_json=f"{{{text}}}")
        if isinstance(event, ev.OperationSubmitted):
            event = self._named(event)
        # Without the checks of the invariants, which the tests do.
        self.journal.append((event, self.now))
        commands = self.core.handle(event, self.now)
        self.take(commands)
        return commands

    def _named(self, event: ev.OperationSubmitted) -> ev.OperationSubmitted:
        name, random_part, digest = (f"{self.chance.getrandbits(128):032x}" for _ in range(3))
        return replace(
            event,
            operation=OperationId(name),
            payload=BlobRef(f"{event.deployment.partition('/')[0]}%2F{name}-{random_part}.in"),
            payload_digest=digest,
            payload_bytes=1 << 20,
        )


def count_bytecodes(work: Callable[[], object]) -> Counter[str]:
    """Executed bytecodes by the name of the thread."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counts[threading.current_thread().name] += 1
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return counts


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = BusyCluster(Path(folder))
        cluster.work(COUNTED)
        cluster.snapshot()
        operations = cluster.core.cluster.state.finished_count
        counts = count_bytecodes(lambda: asyncio.run(cluster.writer.archive_now()))
        loop, thread = (counts[name] / operations for name in ("MainThread", "history"))
        cluster.work(ROUNDS - COUNTED)
        cluster.save()
        pieces = cluster.archive.pieces()
        sizes = {kind: sum(p.nbytes for p in pieces if p.kind == kind) for kind in (EVENTS, RUNS)}
        state = max(piece.nbytes for piece in pieces if piece.kind == STATE)
        raw = 0
        for piece in pieces:
            if piece.kind == EVENTS:
                content = cluster.archive.read(piece)
                assert content is not None
                raw += sum(map(len, decode_events(piece, content).bodies))
        operations, events = cluster.core.cluster.state.finished_count, len(cluster.journal)
    figures = {
        "events_per_operation": events / operations,
        "event_bytes_per_operation": sizes[EVENTS] / operations,
        "run_bytes_per_operation": sizes[RUNS] / operations,
        "state_bytes_per_operation": state / operations,
        "uncompressed_bytes_per_operation": raw / operations,
        "loop_bytecodes_per_operation": loop,
        "thread_bytecodes_per_operation": thread,
    }
    rows = [(name.replace("_", " "), f"{value:,.1f}") for name, value in figures.items()]
    report(f"Archive of {operations:,} operations", ("of each operation", "count"), rows, figures)


if __name__ == "__main__":
    main()
