"""Do 80 % of the waits start inside the interval that `plexrl explain` gives?

    python -m benchmarks.simulating.eta [--quick] [--json] [--full]

The published mix is simulated on its training pool (`benchmarks/simulating/cluster.py`), under
several policies. Waiting operations are asked about at random moments of their waits and on
arrival, as a user would, through the scheduler's own query; a wait that has begun cannot change
what later ones are told. The answer is compared with the real start.

*fixed* is the interval from half to twice the same estimate, which knows no past errors. The width
is relative to the mean wait that is left. `eta_coverage` is the part of all answers whose operation
starts inside, over the policies; `eta_coverage_error` is its distance from 0.8.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.report import Part, report
from benchmarks.simulating.cluster import training_pool, whole
from benchmarks.sizes import sized
from plexrl.ids import OperationId
from plexrl.scheduler.state.messages import commands as cmd
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.trace_run import TraceRun

POLICIES = sized(("spread+backfill", "pack", "fcfs"), quick=("pack",))
WAITS = sized(8_000, quick=200)
"""Waits of a run that are watched."""
ASK = 0.1
"""Chance that after an event one of the waiting operations is asked about."""
COLUMNS = ("policy, moment", "answers", "inside", "early", "late", "width", "fixed", "its width")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An estimate and what came of it, in seconds from the question."""

    eta_s: float
    low_s: float
    high_s: float
    waited_s: float

    @property
    def is_inside(self) -> bool:
        """Whether the operation started inside the interval."""
        return self.low_s <= self.waited_s <= self.high_s

    @property
    def is_near(self) -> bool:
        """Whether it started between half and twice the estimate."""
        return self.eta_s / 2.0 <= self.waited_s <= 2.0 * self.eta_s


@dataclass(slots=True)
class Watcher:
    """Asks about waiting operations and remembers the answers."""

    run: TraceRun
    chance: random.Random
    on_arrival: list[Answer] = field(default_factory=list)
    later: list[Answer] = field(default_factory=list)
    _asked: dict[OperationId, list[tuple[float, float, float, float]]] = field(default_factory=dict)
    """Time, estimate and interval of each answer about a waiting operation; first on arrival."""

    def observe(self, event: ev.Event, commands: Sequence[cmd.Command], now: float) -> None:
        """Follow the core's work."""
        for command in commands:
            if isinstance(command, cmd.RunOperation) and command.operation in self._asked:
                self._started(command.operation, now)
        if isinstance(event, ev.OperationSubmitted):
            self._ask(event.operation, now)
        elif self._asked and self.chance.random() < ASK:
            self._ask(self.chance.choice(list(self._asked)), now)

    def _ask(self, operation: OperationId, now: float) -> None:
        found = self.run.shell.core.operation_view(operation, now)["explanation"]
        if found is None or found["eta_s"] is None or found["eta_low_s"] is None:
            return
        assert found["eta_high_s"] is not None, "an interval has two ends"
        answer = now, found["eta_s"], found["eta_low_s"], found["eta_high_s"]
        self._asked.setdefault(operation, []).append(answer)

    def _started(self, operation: OperationId, now: float) -> None:
        first, *others = (
            Answer(eta_s=eta_s, low_s=low_s, high_s=high_s, waited_s=now - asked_at)
            for asked_at, eta_s, low_s, high_s in self._asked.pop(operation)
        )
        self.on_arrival.append(first)
        self.later += others


def watched(policy: str, waits: int) -> Watcher:
    """The answers of one run, which ends after so many waits."""
    run = TraceRun(training_pool(whole(policy, seed=1, staleness=0)))
    watcher = Watcher(run, random.Random(1))
    run.shell.observe(watcher.observe)
    run.start()
    while len(watcher.on_arrival) < waits and run.shell.run(500) == 500:
        pass
    return watcher


def measure(*, full: bool) -> Part:
    """All policies; `full`: ten times as many waits."""
    rows: list[tuple[str, ...]] = []
    later: list[Answer] = []
    arrived: list[Answer] = []
    for policy in POLICIES:
        found = watched(policy, 10 * WAITS if full else WAITS)
        rows += [
            _row(f"{policy}, on arrival", found.on_arrival),
            _row(f"{policy}, later", found.later),
        ]
        arrived += found.on_arrival
        later += found.later
    answers = arrived + later
    coverage = fmean(each.is_inside for each in answers)
    return Part(
        title="Starts inside the 80 % intervals of `plexrl explain`, simulated",
        columns=COLUMNS,
        rows=rows,
        figures={
            "eta_coverage": coverage,
            "eta_coverage_error": abs(coverage - 0.8),
            "eta_coverage_on_arrival": fmean(each.is_inside for each in arrived),
            "eta_coverage_later": fmean(each.is_inside for each in later),
            "eta_width": _width([each.high_s - each.low_s for each in answers], answers),
            "eta_fixed_coverage": fmean(each.is_near for each in answers),
            "eta_fixed_width": _width([1.5 * each.eta_s for each in answers], answers),
            "eta_waits": len(arrived),
        },
    )


def _row(name: str, answers: Sequence[Answer]) -> tuple[str, ...]:
    return (
        name,
        str(len(answers)),
        f"{fmean(each.is_inside for each in answers):.1%}",
        f"{fmean(each.waited_s < each.low_s for each in answers):.1%}",
        f"{fmean(each.waited_s > each.high_s for each in answers):.1%}",
        f"{_width([each.high_s - each.low_s for each in answers], answers):.2f}",
        f"{fmean(each.is_near for each in answers):.1%}",
        f"{_width([1.5 * each.eta_s for each in answers], answers):.2f}",
    )


def _width(widths: Sequence[float], answers: Sequence[Answer]) -> float:
    """Mean width by the mean wait."""
    return fmean(widths) / fmean(each.waited_s for each in answers)


def main() -> None:
    """Measure and report."""
    found = measure(full="--full" in sys.argv)
    report(found.title, found.columns, found.rows, found.figures)


if __name__ == "__main__":
    main()
