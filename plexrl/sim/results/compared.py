"""Compares two results documents: differing settings and differing figures. Pure.

A document is the `results.json` of `plexrl simulate --out`. A run of one document is paired with
the run of the other at the same point of the sweep, where all settings that vary within either
document are equal. Settings that are constant within each document may differ: they are compared.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Unit = Literal["time", "part", "money", "count"]

FIGURES: dict[str, tuple[str, Unit]] = {
    "training GPUs": ("gpus", "count"),
    "drain": ("drain_s", "time"),
    "wait p50": ("wait.median", "time"),
    "wait mean": ("wait.mean", "time"),
    "wait p95": ("wait.p95", "time"),
    "job slowdown p50": ("job_slowdown.median", "part"),
    "job slowdown mean": ("job_slowdown.mean", "part"),
    "job slowdown p95": ("job_slowdown.p95", "part"),
    "cycle slowdown p50": ("cycle_slowdown.median", "part"),
    "cycle slowdown p95": ("cycle_slowdown.p95", "part"),
    "jobs over SLO": ("jobs_over_slo", "count"),
    "worst tenant": ("worst_tenant", "count"),
    "GPU-h/cycle": ("gpu_hours_per_cycle", "count"),
    "switches": ("switches", "count"),
    "failures": ("failures", "count"),
    "failed jobs": ("failed_jobs", "count"),
    "cycles": ("cycles", "count"),
    "cost": ("cost", "money"),
}
"""Name, path in a result, and unit of each compared figure."""

OPTIONS = {
    "policy": "--policy",
    "seed": "--seed",
    "switch_s": "--switch-s",
    "slo": "--job-slo",
    "detail": "--detail",
    "window_s": "--window",
    "behaviour.jitter": "--jitter",
    "behaviour.staleness": "--staleness",
    "behaviour.responses": "--responses",
    "behaviour.lengths": "--lengths",
    "failures.node_mtbf_s": "--node-mtbf-hours",
    "failures.repair_s": "--repair-minutes",
    "failures.worker_mtbf_s": "--worker-mtbf-hours",
    "failures.state_survives": "--state-survives",
    "nodes": "--nodes",
    "node_type.name": "--node-type",
    "node_type.gpus": "--gpus-per-node",
    "node_type.price": "--price",
    "source.trace": "TRACE",
    "source.layout": "--from",
    "source.profiles": "--profiles",
    "source.any_node_type": "--any-node-type",
    "source.gpus_max": "--max-gpus",
    "source.span_s": "--days",
    "source.jobs_per_day": "--jobs-per-day",
    "source.shape.compress": "--compress",
    "source.shape.backlog": "--backlog",
    "source.shape.cap_s": "--cap-days",
    "source.shape.gpus_min": "--min-gpus",
    "source.shape.start_s": "--start-day",
    "source.shape.duration_s_min": "--min-duration",
}
"""The option of each scenario field; other fields appear under their own names."""

SAME = 1e-9

IGNORED_FIELDS = frozenset({"source.skip_bad", "source.seed"})
"""`skip_bad` changes no valid job; the source's seed equals `seed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSetting:
    """A setting that differs between the documents."""

    name: str
    """The option's name, if there is one."""
    a: tuple[Any, ...]
    """Values in the runs of the first document."""
    b: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a pair; None: the document lacks it."""

    name: str
    unit: Unit
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """`b - a`."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def differs(self) -> bool:
        """Whether the values differ by more than rounding."""
        if self.a is None or self.b is None:
            return self.a is not self.b
        return not math.isclose(self.a, self.b, rel_tol=SAME, abs_tol=SAME)

    @property
    def change(self) -> float | None:
        """The relative difference; None if `a` is 0."""
        return None if self.difference is None or not self.a else self.difference / abs(self.a)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run of each document at the same point of the sweep."""

    label: str
    a: int
    """Index of the run in the first document."""
    b: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultComparison:
    """All differences."""

    settings: tuple[ComparedSetting, ...]
    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...] = ()
    """Runs of the first document without a counterpart in the second."""
    only_b: tuple[str, ...] = ()
    smallest: tuple[Pair, ...] = ()
    """Results of cluster size searches, by policy."""
    warnings: tuple[str, ...] = ()
    """Reasons why the comparison may mislead."""


def compare_results(a: Mapping[str, Any], b: Mapping[str, Any]) -> ResultComparison:
    """Compare two documents, each with a trace and runs."""
    searched = bool(a.get("smallest") or b.get("smallest"))
    asked_a, asked_b = _questions(a, searched), _questions(b, searched)
    axes = sorted(
        _varying(asked_a) | _varying(asked_b), key=lambda name: (name != OPTIONS["policy"], name)
    )
    settings = (*_objectives(a, b), *_settings(asked_a, asked_b))
    runs_a = {_point(each, axes): index for index, each in enumerate(asked_a)}
    runs_b = {_point(each, axes): index for index, each in enumerate(asked_b)}
    label = {place: _label(place, axes) for place in (*runs_a, *runs_b)}
    pairs = tuple(
        Pair(
            label=label[place] or _policies(asked_a[index], asked_b[runs_b[place]]),
            a=index,
            b=runs_b[place],
            figures=_figures(a["runs"][index]["result"], b["runs"][runs_b[place]]["result"]),
        )
        for place, index in runs_a.items()
        if place in runs_b
    )
    found = ResultComparison(
        settings=settings,
        pairs=pairs,
        only_a=tuple(label[place] for place in runs_a if place not in runs_b),
        only_b=tuple(label[place] for place in runs_b if place not in runs_a),
        smallest=_smallest(a, b),
    )
    return replace(found, warnings=tuple(_warnings(a, b, found)))


def _questions(document: Mapping[str, Any], searched: bool) -> list[dict[str, Any]]:
    """Each run's scenario as flat settings, without the cluster size if that was searched for."""
    found = []
    for run in document["runs"]:
        flat = dict(_flat("", run["scenario"]))
        if len(run["scenario"].get("pools", ())) == 1:
            flat = {name.removeprefix("pools.0."): value for name, value in flat.items()}
        left_out = IGNORED_FIELDS | ({"nodes", "pools.0.nodes"} if searched else set())
        found.append(
            {OPTIONS.get(name, name): each for name, each in flat.items() if name not in left_out}
        )
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), each)
    elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
        for index, each in enumerate(value):
            yield from _flat(f"{name}.{index}", each)
    else:
        yield name, tuple(value) if isinstance(value, list) else value


def _values(asked: Sequence[Mapping[str, Any]], name: str) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(each.get(name) for each in asked))


def _varying(asked: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for each in asked for name in each if len(_values(asked, name)) > 1}


def _settings(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> Iterator[ComparedSetting]:
    for name in dict.fromkeys(name for each in (*a, *b) for name in each):
        in_a, in_b = _values(a, name), _values(b, name)
        if set(in_a) != set(in_b):
            yield ComparedSetting(name=name, a=in_a, b=in_b)


def _objectives(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ComparedSetting]:
    of_a, of_b = _asked_objectives(a), _asked_objectives(b)
    if of_a != of_b:
        yield ComparedSetting(name="--slo", a=of_a, b=of_b)


def _asked_objectives(document: Mapping[str, Any]) -> tuple[Any, ...]:
    plans = document.get("smallest") or ()
    return tuple(
        dict.fromkeys(objective for plan in plans for objective in plan["objectives"])
    ) or (None,)


def _point(asked: Mapping[str, Any], axes: Sequence[str]) -> tuple[Any, ...]:
    return tuple(asked.get(name) for name in axes)


def _label(place: Sequence[Any], axes: Sequence[str]) -> str:
    said = zip(axes, place, strict=True)
    return ", ".join(
        str(value) if name == "--policy" else f"{name.removeprefix('--')} {value}"
        for name, value in said
    )


def _policies(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    one, other = a.get("--policy"), b.get("--policy")
    return str(one) if one == other else f"{one} and {other}"


def _figures(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Figure, ...]:
    found = (
        Figure(name=name, unit=unit, a=_number(a, place), b=_number(b, place))
        for name, (place, unit) in FIGURES.items()
    )
    return tuple(each for each in found if each.a is not None or each.b is not None)


def _number(values: Mapping[str, Any], place: str) -> float | None:
    found: Any = values
    for name in place.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number else None


def _smallest(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Pair, ...]:
    plans_a = {plan["policy"]: (at, plan) for at, plan in enumerate(a.get("smallest") or ())}
    plans_b = {plan["policy"]: (at, plan) for at, plan in enumerate(b.get("smallest") or ())}
    return tuple(
        Pair(
            label=policy,
            a=at,
            b=plans_b[policy][0],
            figures=(
                Figure(
                    name="nodes",
                    unit="count",
                    a=_number(plan, "nodes"),
                    b=_number(plans_b[policy][1], "nodes"),
                ),
            ),
        )
        for policy, (at, plan) in plans_a.items()
        if policy in plans_b
    )


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any], found: ResultComparison) -> Iterator[str]:
    differing = [
        f"{name} {_shown(a['trace'].get(name))} and {_shown(b['trace'].get(name))}"
        for name in dict.fromkeys((*a["trace"], *b["trace"]))
        if name != "name" and a["trace"].get(name) != b["trace"].get(name)
    ]
    if differing:
        yield f"the jobs differ ({', '.join(differing)}), which also changes the figures"
    versions = [each.get("version") for each in (a, b)]
    if versions[0] != versions[1]:
        shown = " and ".join(version or "unknown" for version in versions)
        yield f"the versions of PlexRL differ ({shown})"
    for name, document in (("A", a), ("B", b)):
        if document.get("failed"):
            yield f"{len(document['failed'])} runs of {name} failed and are not compared"
    is_same = not found.settings and not differing
    if is_same and any(figure.differs for pair in found.pairs for figure in pair.figures):
        yield "the settings are equal but the figures differ: the programs were different"


def _shown(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
