"""Do 80 % of the waits start inside the interval that `plexrl explain` gives?

    python -m benchmarks.simulating.eta [--quick] [--json] [--full]

The published mix is simulated on its training pool (`benchmarks/simulating/cluster.py`), under
several policies. Waiting operations are asked about at random moments of their waits and on
arrival, as a user would, through the scheduler's own query; a wait that has begun cannot change
what later ones are told. The answer is compared with the real start.

*fixed* is the interval from half to twice the same estimate, which knows no past errors. A *score*
is the interval score of Winkler (1972) for 80 %: the width, and ten times the distance of a start
outside; the smaller, the better. Width and score are relative to the mean wait that is left.
`eta_coverage` is the part of all answers whose operation starts inside, over the policies;
`eta_coverage_error` is its distance from 0.8; `eta_score_ratio` is the score by that of *fixed*.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from statistics import fmean

from benchmarks.report import Part, report
from benchmarks.simulating.cluster import training_pool, whole
from benchmarks.sizes import sized
from plexrl.ids import OperationId
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.wire import messages as cmd

POLICIES = sized(("spread+backfill", "pack", "fcfs"), quick=("pack",))
WAITS = sized(8_000, quick=200)
"""Waits of a run that are watched."""
ASK = 0.1
"""Chance that after an event one of the waiting operations is asked about."""
OUTSIDE = 10.0
"""Factor of the distance outside of an 80 % interval: 2 / 0.2."""
COLUMNS = (
    *("policy, moment", "answers", "inside", "early", "late", "width", "score"),
    *("fixed", "its width", "its score"),
)


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
    def fixed(self) -> "Answer":
        """The same question answered by half to twice the estimate."""
        return replace(self, low_s=self.eta_s / 2.0, high_s=2.0 * self.eta_s)

    @property
    def width_s(self) -> float:
        """Length of the interval."""
        return self.high_s - self.low_s

    @property
    def score_s(self) -> float:
        """Interval score: the width, and a penalty for a start outside."""
        outside_s = max(0.0, self.low_s - self.waited_s, self.waited_s - self.high_s)
        return self.width_s + OUTSIDE * outside_s


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
            if isinstance(command, cmd.Run) and command.operation in self._asked:
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
    return Part(
        title="Starts inside the 80 % intervals of `plexrl explain`, simulated",
        columns=COLUMNS,
        rows=rows,
        figures={
            **quality(arrived + later, "eta"),
            "eta_coverage_on_arrival": quality(arrived, "eta")["eta_coverage"],
            "eta_coverage_later": quality(later, "eta")["eta_coverage"],
            "eta_waits": len(arrived),
        },
    )


def quality(answers: Sequence[Answer], name: str) -> dict[str, float]:
    """Figures of these answers, which begin with `name`; NaN if there are none."""
    if not answers:
        return {f"{name}_coverage": nan, f"{name}_coverage_error": nan}
    fixed = [each.fixed for each in answers]
    coverage = fmean(each.is_inside for each in answers)
    return {
        f"{name}_coverage": coverage,
        f"{name}_coverage_error": abs(coverage - 0.8),
        f"{name}_early": fmean(each.waited_s < each.low_s for each in answers),
        f"{name}_late": fmean(each.waited_s > each.high_s for each in answers),
        f"{name}_width": _by_wait([each.width_s for each in answers], answers),
        f"{name}_score": _by_wait([each.score_s for each in answers], answers),
        f"{name}_fixed_coverage": fmean(each.is_inside for each in fixed),
        f"{name}_fixed_width": _by_wait([each.width_s for each in fixed], answers),
        f"{name}_fixed_score": _by_wait([each.score_s for each in fixed], answers),
        f"{name}_score_ratio": fmean(each.score_s for each in answers)
        / fmean(each.score_s for each in fixed),
    }


def _row(name: str, answers: Sequence[Answer]) -> tuple[str, ...]:
    found = quality(answers, "eta")
    parts = (f"{found[f'eta_{key}']:.1%}" for key in ("coverage", "early", "late"))
    sizes = (f"{found[f'eta_{key}']:.2f}" for key in ("width", "score"))
    fixed = (f"{found[f'eta_fixed_{key}']:.2f}" for key in ("width", "score"))
    covered = f"{found['eta_fixed_coverage']:.1%}"
    return (name, str(len(answers)), *parts, *sizes, covered, *fixed)


def _by_wait(seconds: Sequence[float], answers: Sequence[Answer]) -> float:
    """Mean of the seconds by the mean wait."""
    return fmean(seconds) / fmean(each.waited_s for each in answers)


def main() -> None:
    """Measure and report."""
    found = measure(full="--full" in sys.argv)
    report(found.title, found.columns, found.rows, found.figures)


if __name__ == "__main__":
    main()
