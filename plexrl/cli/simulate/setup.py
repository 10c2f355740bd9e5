"""What `plexrl simulate` is asked, from its options to scenarios."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import get_args

from plexrl.cli.traces.command import DAY_S
from plexrl.errors import InvalidRequestError
from plexrl.sim.search.axes import Axis, axis, policies_named
from plexrl.sim.search.objectives import Objective, objectives
from plexrl.sim.search.what_if import Change, change
from plexrl.sim.state.node_types import node_type as named_type
from plexrl.sim.state.node_types import with_fields
from plexrl.sim.workload.scenario import JITTER_MAX, NODES_MAX, Detail, Pool, ToolStalls
from plexrl.sim.workload.trace_source import PublishedSource, TraceSource
from plexrl.traces import Shape

PUBLISHED = "published"
PUBLISHED_DAYS = 90.0
WINDOW_HOURS_MAX = 1e6
STALL_S_MAX = 1e6
"""Of a rollout that waits for tools, on average: twelve days."""

Source = TraceSource | PublishedSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked of a scenario."""

    axes: tuple[Axis, ...]
    """Policies are one of them."""
    objectives: tuple[Objective, ...] = ()
    """Not empty: the smallest cluster is searched for, with each policy."""
    changes: tuple[Change, ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        """To be compared."""
        return next(each.values for each in self.axes if each.name == "policy")


def questions(
    policy: str,
    sweep: Sequence[str] | None,
    slo: Sequence[str] | None,
    what_if: Sequence[str] | None,
) -> Questions:
    """The questions, each understood.

    Raises:
        InvalidRequestError: one is not, or they do not go together.
    """
    axes = [axis(each) for each in sweep or ()]
    if not any(each.name == "policy" for each in axes):
        # Policies turn quickest: what is to be compared stands together.
        axes.append(Axis(name="policy", values=policies_named(policy)))
    if slo and len(axes) > 1:
        raise InvalidRequestError(
            "--slo searches for the number of nodes and compares policies: beside it, --sweep "
            "can vary policy alone"
        )
    return Questions(
        axes=tuple(axes),
        objectives=objectives(list(slo)) if slo else (),
        changes=tuple(change(each) for each in what_if or ()),
    )


def source(
    trace: str,
    *,
    shape: Shape,
    days: float | None,
    gpus_max: int | None,
    seed: int,
    layout: str | None,
    skip_bad: bool,
    any_node_type: bool,
    profiles: bool,
    jobs_per_day: float,
) -> Source:
    """Where the jobs come from."""
    if trace == PUBLISHED:
        return PublishedSource(
            span_s=(PUBLISHED_DAYS if days is None else days) * DAY_S,
            jobs_per_day=jobs_per_day,
            shape=shape,
            gpus_max=gpus_max,
            seed=seed,
        )
    return replace(
        TraceSource.at(trace),
        layout=layout,
        skip_bad=skip_bad,
        shape=shape,
        gpus_max=gpus_max,
        any_node_type=any_node_type,
        span_s=None if days is None else days * DAY_S,
        profiles=profiles,
        seed=seed,
    )


def pools(
    nodes: int,
    gpus_per_node: int | None,
    node_type: str,
    given: Sequence[str] | None,
    price: float | None,
) -> tuple[Pool, ...]:
    """The cluster.

    Raises:
        InvalidRequestError: a pool or a node type cannot be understood.
    """
    wanted = [_pool(each) for each in given] if given else [(node_type, nodes)]
    changes: dict[str, float] = {}
    if gpus_per_node is not None:
        changes["gpus"] = gpus_per_node
    if price is not None:
        changes["price"] = price
    found = []
    for name, count in wanted:
        kind = with_fields(named_type(name), changes, where=f"node type {name!r}")
        found.append(Pool(nodes=count, node_type=kind))
    names = [pool.node_type.name for pool in found]
    if len(set(names)) < len(names):
        raise InvalidRequestError(
            f"pools {', '.join(names)}: two have one name; add their nodes up, or give the types "
            "in files names of their own"
        )
    return tuple(found)


def stalls(given: str | None) -> ToolStalls | None:
    """Of `CHANCE:SECONDS[:SIGMA]`.

    Raises:
        InvalidRequestError: it has no such form.
    """
    if given is None:
        return None
    numbers = _numbers(given)
    if numbers is None or len(numbers) not in (2, 3):
        raise InvalidRequestError(
            f"--tool-stalls {given!r}: write CHANCE:SECONDS or CHANCE:SECONDS:SIGMA, as 0.1:120"
        )
    chance, mean_s, *sigma = numbers
    if chance > 1 or mean_s > STALL_S_MAX or max(sigma, default=0.0) > JITTER_MAX:
        raise InvalidRequestError(
            f"--tool-stalls {given!r}: a chance is 0 to 1, seconds are at most {STALL_S_MAX:,.0f} "
            f"and sigma is at most {JITTER_MAX:g}"
        )
    found = ToolStalls(chance=chance, mean_s=mean_s)
    return replace(found, sigma=sigma[0]) if sigma else found


def window(given: str | None) -> tuple[float, float] | None:
    """Seconds of `START:END` in hours.

    Raises:
        InvalidRequestError: it has no such form.
    """
    if given is None:
        return None
    numbers = _numbers(given)
    if numbers is None or len(numbers) != 2 or not numbers[0] < numbers[1] <= WINDOW_HOURS_MAX:
        raise InvalidRequestError(
            f"--window {given!r}: write START:END in hours, as 24:30, at most {WINDOW_HOURS_MAX:g}"
        )
    return numbers[0] * 3600.0, numbers[1] * 3600.0


def detail(given: str) -> Detail:
    """By its name.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    for known in get_args(Detail):
        if given == known:
            return given  # type: ignore[return-value]  # mypy does not narrow by get_args
    raise InvalidRequestError(f"--detail {given!r}: use {' or '.join(get_args(Detail))}")


def lengths(given: str) -> str:
    """The law's name, or a path that is right in any process.

    Raises:
        InvalidRequestError: there is no such file.
    """
    if given == "r1":
        return given
    path = Path(given).absolute()
    if not path.is_file():
        raise InvalidRequestError(f"--lengths {given!r} is neither r1 nor a file")
    return str(path)


def _pool(given: str) -> tuple[str, int]:
    name, colon, count = given.rpartition(":")
    if not colon or not (count.isascii() and count.isdigit()):
        raise InvalidRequestError(f"--pool {given!r}: write NODE_TYPE:NODES, as h100:64")
    if not 1 <= int(count[:9]) <= NODES_MAX:
        raise InvalidRequestError(f"--pool {given!r}: a pool has 1 to {NODES_MAX} nodes")
    return name, int(count)


def _numbers(given: str) -> list[float] | None:
    try:
        numbers = [float(part) for part in given.split(":")]
    except ValueError:
        return None
    return numbers if all(isfinite(number) and number >= 0 for number in numbers) else None
