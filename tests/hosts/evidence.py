"""What the journal and the workers' own logs say: who ran what, and when.

The journal is replayed by a scheduler core of this process, which gives the commands again. Each
worker logs begin and end of every run that changes or moves state. All hosts of a test have one
wall clock, so the logs of different hosts have one order.
"""

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from plexrl.errors import PlexRLError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.state.messages.events import (
    CODEC,
    Event,
    OperationCancelled,
    OperationFinished,
    OperationSubmitted,
)
from plexrl.wire.messages import LaunchWorkers
from plexrl.wire.messages import Run as RunMessage

LINE = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO rank (?P<rank>\d+) "
    r"incarnation (?P<incarnation>\d+): (?P<edge>begin|end) (?P<kind>\S+) (?P<operation>\S+) "
    r"token (?P<token>\d+) seq (?P<seq>\d+)"
)
Start = tuple[str, int]
"""A deployment and an incarnation."""
Run = tuple[str, int, int, str, int]
"""A run on one rank: deployment, rank, incarnation, operation, token."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Begin or end of a run on one rank, as its worker logged it."""

    at: float
    deployment: str
    rank: int
    incarnation: int
    is_begin: bool
    operation: str
    token: int
    where: str
    """Log file."""

    @property
    def run(self) -> Run:
        """The run that begins or ends."""
        return self.deployment, self.rank, self.incarnation, self.operation, self.token

    def __str__(self) -> str:
        edge = "begins" if self.is_begin else "ends"
        return (
            f"{datetime.fromtimestamp(self.at, UTC)} {self.deployment} rank {self.rank} "
            f"incarnation {self.incarnation} {edge} {self.operation} "
            f"with token {self.token} ({self.where})"
        )


@dataclass(slots=True)
class History:
    """What a replay of the journal shows."""

    submitted: set[str] = field(default_factory=set)
    """Accepted operations."""
    resent: int = 0
    """Submissions that a controller repeated, because it had got no answer to the first."""
    cancelled: set[str] = field(default_factory=set)
    finished: dict[str, int] = field(default_factory=dict)
    """How often the completion of an operation counted, replays of lost state left out."""
    repeated: list[str] = field(default_factory=list)
    """Operations that were run anew, not as a replay, although their completion had counted."""
    groups: dict[Start, str] = field(default_factory=dict)
    """The group on which each start of a deployment's workers ran."""


class JournalCopy:
    """All events of a live journal: copied often enough, none is lost when the scheduler deletes
    those that a snapshot replaces."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._rows: list[tuple[float, str]] = []

    def take(self) -> None:
        """Copy the events that came since the last time."""
        with closing(sqlite3.connect(f"file:{self._journal}?mode=ro", uri=True)) as source:
            query = "SELECT position, at, body FROM events WHERE position > ? ORDER BY position"
            for position, at, body in source.execute(query, (len(self._rows),)):
                assert position == len(self._rows) + 1, f"no event {len(self._rows) + 1} any more"
                self._rows.append((at, body))

    def __iter__(self) -> Iterator[tuple[Event, float]]:
        return ((CODEC.decode(body), at) for at, body in self._rows)


def read_history(events: Iterable[tuple[Event, float]], config: SchedulerConfig) -> History:
    """Replay all events of a journal."""
    history, runs = History(), dict[str, RunMessage]()
    core = SchedulerCore(config)
    for event, at in events:
        if isinstance(event, OperationFinished):
            run = runs.pop(event.operation, None)
            if run is not None and run.token == event.token and not run.replay:
                count = history.finished.get(event.operation, 0)
                history.finished[event.operation] = count + 1
        try:
            commands = core.handle(event, at)
        except PlexRLError:
            # Refused when it was live as well.
            continue
        if isinstance(event, OperationSubmitted):
            history.resent += event.operation in history.submitted
            history.submitted.add(event.operation)
        elif isinstance(event, OperationCancelled):
            history.cancelled.add(event.operation)
        for command in commands:
            if isinstance(command, LaunchWorkers):
                start = (command.deployment, command.incarnation)
                history.groups[start] = command.group
            elif isinstance(command, RunMessage):
                runs[command.operation] = command
                if command.operation in history.finished and not command.replay:
                    history.repeated.append(command.operation)
    return history


def check_operations(history: History) -> None:
    """Every accepted operation completed, once."""
    assert history.submitted, "the journal has no operation"
    lost = [
        each
        for each in sorted(history.submitted)
        if each not in history.finished and each not in history.cancelled
    ]
    assert not lost, f"{len(lost)} accepted operations were lost: {lost[:10]}"
    doubled = [each for each, count in history.finished.items() if count > 1]
    assert not doubled, f"completed twice: {doubled[:10]}"
    assert not history.repeated, f"run again after their completion: {history.repeated[:10]}"


def read_edges(logs: Iterable[Path]) -> list[Edge]:
    """All runs in the workers' logs of all nodes (`logs/NODE/JOB/NAME-RANK.log`), by time."""
    found = []
    for path in logs:
        deployment = f"{path.parent.name}/{path.stem.rpartition('-')[0]}"
        for line in path.read_text(errors="replace").splitlines():
            match = LINE.match(line)
            if match is not None:
                at = datetime.fromisoformat(match["at"].replace(",", ".")).timestamp()
                found.append(
                    Edge(
                        at,
                        deployment,
                        int(match["rank"]),
                        int(match["incarnation"]),
                        match["edge"] == "begin",
                        match["operation"],
                        int(match["token"]),
                        str(path),
                    )
                )
    return sorted(found, key=lambda edge: edge.at)


def check_one_holder(edges: Sequence[Edge], groups: dict[Start, str]) -> None:
    """On each group nobody acts with an older token once a newer one was used, and no two
    deployments run at the same time; of each rank only the newest process acts."""
    assert edges, "the workers' logs show no run"
    newest: dict[str, Edge] = {}
    latest: dict[tuple[str, int], Edge] = {}
    ended = {edge.run for edge in edges if not edge.is_begin}
    running: dict[str, dict[Run, Edge]] = defaultdict(dict)
    for edge in edges:
        rank = (edge.deployment, edge.rank)
        before = latest.setdefault(rank, edge)
        assert edge.incarnation >= before.incarnation, f"{edge}, after {before}"
        latest[rank] = edge
        group = groups[edge.deployment, edge.incarnation]
        holder = newest.setdefault(group, edge)
        assert edge.token >= holder.token, f"{group}: {edge}, after {holder}"
        newest[group] = edge
        if not edge.is_begin:
            running[group].pop(edge.run, None)
            continue
        others = [other for other in running[group].values() if other.deployment != edge.deployment]
        assert not others, f"{group}: {edge}, while {others[0]}"
        # The run of a process that was killed has no end: its successor's start is what counts.
        if edge.run in ended:
            running[group][edge.run] = edge
