"""Converts the export of a Weights & Biases run into the demand of a job's cycles.

An export is a table of the run's history with one row per RL step: CSV from the web page or
`run.history()`, or JSON lines from `run.scan_history()`. The metric names of training frameworks
determine the phases; further names can be given.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces.formats.records import Record, csv_records, json_records
from plexrl.traces.io.file_header import Header, header_error, read_header
from plexrl.traces.io.problems import Problem, Problems, Report
from plexrl.traces.schema import TraceJob, TraceSegment, is_function

STEP = "step"
"""The whole cycle."""

OFF_GROUP = frozenset({"rollout", "reward"})
"""Phases that do not use the training GPUs."""

ORDER = ("rollout", "reward", "log_prob", "ref_log_prob", "values", "advantage", "update_critic")
"""Order of phases in a cycle; other names follow in the file's order, then those of `LAST`."""
LAST = ("update", "sync")

METRICS: dict[str, str] = {
    # The paper's own names.
    "compute_log_prob": "log_prob",
    "update_actor": "update",
    "sync_weight": "sync",
    "cycle_time": STEP,
    # verl
    "timing_s/gen": "rollout",
    "timing_s/reward": "reward",
    "timing_s/old_log_prob": "log_prob",
    "timing_s/ref": "ref_log_prob",
    "timing_s/values": "values",
    "timing_s/adv": "advantage",
    "timing_s/update_critic": "update_critic",
    "timing_s/update_actor": "update",
    "timing_s/update_weights": "sync",
    "timing_s/step": STEP,
    # slime
    "perf/rollout_time": "rollout",
    "perf/log_probs_time": "log_prob",
    "perf/ref_log_probs_time": "ref_log_prob",
    "perf/actor_train_time": "update",
    "perf/update_weights_time": "sync",
    "perf/step_time": STEP,
    # OpenRLHF
    "timing/generation": "rollout",
    "timing/make_experience": "log_prob",
    "timing/ppo_train": "update",
    "timing/broadcast": "sync",
    "timing/step_total": STEP,
}
"""Phase by metric. Times of evaluation and checkpoints are excluded: they are not in a cycle."""

WARM_UP = 1
"""First steps of a run that are excluded: they compile and fill caches."""

MAD_TO_DEVIATION = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""

_CHART = re.compile(r"(?P<run>.+) - (?P<metric>[^ ].*)")
"""Column names of a chart's CSV, which also has `__MIN` and `__MAX` columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProfile:
    """Median durations of a run's steps; a single slow step has no effect."""

    run: str
    """Name of the run, if the export has it."""
    steps: int
    """Number of measured steps."""
    period_s: float
    jitter_s: float
    phases: tuple[tuple[str, float], ...]
    """Names and seconds in the order of a cycle, with phases off the training GPUs."""

    @property
    def segments(self) -> tuple[TraceSegment, ...]:
        """The phases on the training GPUs. Unmeasured time of a step counts as rollout, at the
        beginning."""
        busy_s = sum(length_s for name, length_s in self.phases if name not in OFF_GROUP)
        at_s = max(0.0, self.period_s - busy_s)
        found = []
        for name, length_s in self.phases:
            if name not in OFF_GROUP and length_s > 0:
                segment = TraceSegment(function=name, offset_s=at_s, duration_s=length_s)
                found.append(segment)
                at_s += length_s
        return tuple(found)

    def job(self, *, gpus: int, **fields: Any) -> TraceJob:
        """The run as a trace job; the caller provides the other fields."""
        given = {"job_id": self.run or "run", "submit_s": 0.0, "cycles": self.steps, **fields}
        return TraceJob(
            gpus=gpus,
            period_s=self.period_s,
            jitter_s=self.jitter_s,
            segments=self.segments,
            **given,
        )


def read_runs(
    path: str | Path,
    *,
    metrics: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    on_problem: Report | None = None,
) -> list[RunProfile]:
    """The profiles of an export, of one run or of each run of a chart.

    `metrics`: phases of further metrics, as `{"my/gen_s": "rollout"}`, with precedence over known
    ones.

    Raises:
        TraceError: bad lines are not skipped, or the file has no phase.
    """
    path = Path(path)
    known = {**METRICS, **(metrics or {})}
    for metric, phase in (metrics or {}).items():
        if not is_function(phase):
            raise InvalidRequestError(f"{metric!r}: {phase!r} is not a name of letters, digits, _")
    problems = Problems(on_problem)
    header = read_header(path)
    columns = _columns(header.names, known)
    if not any(phase not in OFF_GROUP | {STEP} for _, _, phase in columns):
        raise TraceError(
            f"{path} has no metric of a training phase: give yours by --metric NAME=PHASE; known "
            f"are {', '.join(METRICS)}"
        )
    taken_of = [name for name, _, _ in columns]
    twice = [name for name in dict.fromkeys(taken_of) if taken_of.count(name) > 1]
    if twice:
        faults = [(name, "is repeated in the header: rename or remove one") for name in twice]
        raise header_error(path, header.line, faults)
    steps: dict[str, list[dict[str, float]]] = {}
    for line, cells in _records(path, header, problems):
        for run, taken in _taken(line, cells, columns, problems).items():
            steps.setdefault(run, []).append(taken)
    if problems.count and not skip_bad:
        raise problems.error(str(path))
    order = list(dict.fromkeys(phase for _, _, phase in columns))
    found = [_profile(run, taken, order) for run, taken in steps.items()]
    profiles = [each for each in found if each is not None]
    if not profiles:
        raise TraceError(f"{path} has no step in which all its phases were measured")
    return profiles


def is_run_export(names: Iterable[str]) -> bool:
    """Whether the columns are step metrics of a training framework."""
    columns = _columns(tuple(names), METRICS)
    return any(phase not in OFF_GROUP | {STEP} for _, _, phase in columns)


def _records(path: Path, header: Header, report: Report) -> Iterator[Record]:
    if header.kind == "json lines":
        return json_records(path, report)
    return csv_records(path, report, None)


def _columns(names: tuple[str, ...], known: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(column, run, phase) of each column with the duration of a phase."""
    found = []
    for name in names:
        chart = _CHART.fullmatch(name)
        run, metric = (chart["run"], chart["metric"]) if chart else ("", name)
        if metric in known:
            found.append((name, run, known[metric]))
    return found


def _taken(
    line: int, cells: Mapping[str, str], columns: list[tuple[str, str, str]], report: Report
) -> dict[str, dict[str, float]]:
    """Seconds by run and phase of one line; lines without phases give an empty result."""
    found: dict[str, dict[str, float]] = {}
    for name, run, phase in columns:
        text = cells.get(name, "").strip()
        if not text or text.lower() == "nan":
            continue
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value < 1e9:
            report(
                Problem(line=line, field=name, message=f"is not a time in seconds: {text[:60]!r}")
            )
            continue
        taken = found.setdefault(run, {})
        taken[phase] = taken.get(phase, 0.0) + value
    return found


def _profile(run: str, steps: list[dict[str, float]], order: list[str]) -> RunProfile | None:
    usual = max((len(step) for step in steps), default=0)
    whole = [step for step in steps if len(step) == usual]
    measured = whole[WARM_UP:] if len(whole) > WARM_UP else whole
    phases = [phase for phase in order if phase != STEP and phase in measured[0]]
    if not any(phase not in OFF_GROUP for phase in phases):
        return None
    known = [step for step in measured if all(phase in step for phase in phases)]
    phases.sort(key=_place)
    totals = [
        max(step.get(STEP, 0.0), sum(step[phase] for phase in phases if phase not in OFF_GROUP))
        if STEP in step
        else sum(step[phase] for phase in phases)
        for step in known
    ]
    lengths = {phase: median(step[phase] for step in known) for phase in phases}
    busy_s = sum(length_s for phase, length_s in lengths.items() if phase not in OFF_GROUP)
    period_s = max(median(totals), busy_s)
    if period_s <= 0:
        return None
    return RunProfile(
        run=run,
        steps=len(known),
        period_s=period_s,
        jitter_s=MAD_TO_DEVIATION * median(abs(total - period_s) for total in totals),
        phases=tuple(lengths.items()),
    )


def _place(phase: str) -> tuple[int, int]:
    if phase in ORDER:
        return 0, ORDER.index(phase)
    return (2, LAST.index(phase)) if phase in LAST else (1, 0)
