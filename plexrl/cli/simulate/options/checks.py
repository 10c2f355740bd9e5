"""Checks the options of `plexrl simulate` before anything is read or run: ranges and combinations.
An option that would have no effect is refused, because the user expects one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from plexrl.cli.terminal.option_groups import option_name
from plexrl.errors import InvalidRequestError
from plexrl.sim.workload.scenario import (
    BETWEEN_FAILURES_S_MIN,
    GPUS_PER_NODE_MAX,
    JITTER_MAX,
    NODES_MAX,
    RESPONSES_MAX,
    SLO_MAX,
    STALENESS_MAX,
    STARVATION_S_MAX,
    SWITCH_S_MAX,
)

YEARS_DAYS = 36_500.0
"""A hundred years."""
WORKERS_MAX = 1024

RANGES: dict[str, tuple[float, float]] = {
    "nodes": (1, NODES_MAX),
    "max_nodes": (1, NODES_MAX),
    "gpus_per_node": (1, GPUS_PER_NODE_MAX),
    "price": (0.0, 1e6),
    "switch_s": (0.0, SWITCH_S_MAX),
    "starvation_s": (0.0, STARVATION_S_MAX),
    "days": (1e-3, YEARS_DAYS),
    "compress": (1e-3, 1e5),
    "cap_days": (1e-4, YEARS_DAYS),
    "min_gpus": (1, 1e6),
    "max_gpus": (1, 1e6),
    "min_duration": (0.0, 1e9),
    "jobs_per_day": (1e-3, 1e6),
    "jitter": (0.0, JITTER_MAX),
    "staleness": (0, STALENESS_MAX),
    "responses": (0, RESPONSES_MAX),
    "job_slo": (0.0, SLO_MAX),
    "node_mtbf_hours": (0.0, 24 * YEARS_DAYS),
    "repair_minutes": (0.0, 1440 * YEARS_DAYS),
    "worker_mtbf_hours": (0.0, 24 * YEARS_DAYS),
    "state_survives": (0.0, 1.0),
    "workers": (1, WORKERS_MAX),
}
"""Range of every number."""

HINTS = {
    "jitter": ", as 0.15 for 15 %",
    "job_slo": ", as 0.05 for 5 %; --slo has objectives of the cluster",
}

NEEDS: dict[str, tuple[str, str]] = {
    "lengths": ("responses", "only a rollout of --responses draws lengths"),
    "repair_minutes": ("node_mtbf_hours", "nodes fail only with --node-mtbf-hours above 0"),
    "state_survives": ("node_mtbf_hours", "nodes fail only with --node-mtbf-hours above 0"),
    "max_nodes": ("slo", "only the search of --slo has a largest size"),
}
"""Options that need another one, and why."""

EXCLUDES: tuple[tuple[str, str, str], ...] = (
    ("nodes", "pool", "each --pool has its own nodes"),
    ("node_type", "pool", "each --pool has its own node type"),
    ("nodes", "slo", "--slo searches for the number of nodes; --max-nodes bounds it"),
    ("pool", "slo", "--slo searches for the number of nodes; give their type by --node-type"),
    ("compress", "backlog", "with --backlog all jobs are submitted at the start"),
    ("workers", "ray", "with --ray the Ray cluster limits the parallel runs"),
)
"""Pairs of options of which the second makes the first ineffective, and why."""

SWEPT = {
    "nodes": ("nodes", "pool"),
    "policy": ("policy",),
    "jitter": ("jitter",),
    "staleness": ("staleness",),
    "switch-s": ("switch_s",),
    "starvation-s": ("starvation_s",),
}
"""Options that an axis of --sweep replaces."""

OF_FILES = ("layout", "skip_bad", "any_node_type", "profiles")
"""Options for traces that are read, not generated."""


def check_options(given: Mapping[str, Any], *, is_published: bool) -> None:
    """Check all options.

    Raises:
        InvalidRequestError: a value is invalid, or an option would have no effect.
    """
    for name, (least, most) in RANGES.items():
        if name in given:
            _check_range(name, given[name], least, most)
    for name in ("node_mtbf_hours", "worker_mtbf_hours"):
        if 0.0 < given.get(name, 0.0) * 3600.0 < BETWEEN_FAILURES_S_MIN:
            raise InvalidRequestError(
                f"{option_name(name)} {given[name]:g}: give at least {BETWEEN_FAILURES_S_MIN:g} s "
                f"({BETWEEN_FAILURES_S_MIN / 3600.0:.3g}), or 0 for never"
            )
    _check_empty(given)
    for name in ("slo", "what_if", "pool"):
        _check_once(name, given.get(name) or ())
    for name, (other, why) in NEEDS.items():
        if name in given and not given.get(other):
            raise _ignored(name, given[name], f"without {option_name(other)}", why)
    for name, other, why in EXCLUDES:
        if name in given and given.get(other):
            raise _ignored(name, given[name], f"with {option_name(other)}", why)
    if given.get("window") and not given.get("out") and not given.get("as_json"):
        why = "the report of --out shows the window, and --json lists it"
        raise _ignored("window", given["window"], "without --out or --json", why)
    for sweep in given.get("sweep") or ():
        axis = sweep.partition("=")[0]
        for name in SWEPT.get(axis, ()):
            if name in given:
                why = "the sweep has all its values"
                raise _ignored(name, given[name], f"with --sweep {axis}", why)
    _check_trace(given, is_published=is_published)


def _check_range(name: str, value: Any, least: float, most: float) -> None:
    if value is None or (least <= value <= most and math.isfinite(value)):
        return
    raise InvalidRequestError(
        f"{option_name(name)} {value}: give at least {least:,.12g} and at most {most:,.12g}"
        + HINTS.get(name, "")
    )


def _check_once(name: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise InvalidRequestError(f"{option_name(name)} {value} is given twice: omit one")


def _check_empty(given: Mapping[str, Any]) -> None:
    """Refuse empty texts, which come from unset shell variables."""
    for name, value in given.items():
        texts = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(text, str) and not text.strip() for text in texts):
            raise InvalidRequestError(f"{option_name(name)} is empty: give it a value or omit it")


def _check_trace(given: Mapping[str, Any], *, is_published: bool) -> None:
    for name in OF_FILES if is_published else ():
        if name in given:
            raise _ignored(name, given[name], "with `published`", "its jobs are generated")
    if "jobs_per_day" in given and not is_published:
        why = "only the jobs of `published` are generated"
        raise _ignored("jobs_per_day", given["jobs_per_day"], "with a trace", why)
    least, most = given.get("min_gpus"), given.get("max_gpus")
    if least is not None and most is not None and least > most:
        raise InvalidRequestError(
            f"--min-gpus {least} is more than --max-gpus {most}: no job is left"
        )


def _ignored(name: str, value: Any, where: str, why: str) -> InvalidRequestError:
    text = option_name(name)
    if name == "profiles":
        text = "--profiles" if value else "--no-profiles"
    elif not isinstance(value, bool):
        values = value if isinstance(value, list | tuple) else (value,)
        text = " ".join(f"{text} {each}" for each in values)
    return InvalidRequestError(f"{text} {where} is ignored: {why}; omit it")
