"""Builds scenarios and questions from the options of `plexrl simulate`."""

from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import get_args

from plexrl.cli.simulate.options.groups import (
    FaultOptions,
    JobOptions,
    PriceOptions,
    QuestionOptions,
    RunOptions,
    SimulatedClusterOptions,
    TraceOptions,
)
from plexrl.cli.traces.command import DAY_S
from plexrl.errors import InvalidRequestError
from plexrl.sim.search.axes import Axis, axis, policies_named
from plexrl.sim.search.objectives import Objective, objectives
from plexrl.sim.search.what_if import Change, change
from plexrl.sim.state.node_types import node_type as named_type
from plexrl.sim.state.node_types import with_fields
from plexrl.sim.workload.prices import Prices
from plexrl.sim.workload.scenario import (
    JITTER_MAX,
    NODES_MAX,
    ROLLOUT_GPUS,
    Behaviour,
    Detail,
    Failures,
    Pool,
    RolloutGpus,
    Scenario,
    ToolStalls,
)
from plexrl.sim.workload.source.trace_source import PublishedSource, TraceSource
from plexrl.traces import Shape

PUBLISHED = "published"
PUBLISHED_DAYS = 90.0
HOUR_S = 3600.0
WINDOW_HOURS_MAX = 1e6
STALL_S_MAX = 1e6
"""Longest mean stall: twelve days."""

Source = TraceSource | PublishedSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions about a scenario."""

    axes: tuple[Axis, ...]
    """Axes of the sweep; one of them is the policy."""
    objectives: tuple[Objective, ...] = ()
    """If not empty, the smallest cluster is searched for under each policy."""
    changes: tuple[Change, ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies to compare."""
        return next(each.values for each in self.axes if each.name == "policy")


def questions(policy: str, options: QuestionOptions) -> Questions:
    """Parse the questions.

    Raises:
        InvalidRequestError: a question is invalid, or questions exclude each other.
    """
    slo = options.slo
    axes = [axis(each) for each in options.sweep or ()]
    if not any(each.name == "policy" for each in axes):
        # Policies vary fastest, so that compared runs are adjacent.
        axes.append(Axis(name="policy", values=policies_named(policy)))
    if slo and len(axes) > 1:
        raise InvalidRequestError(
            "--slo searches for the number of nodes and compares policies: with it, --sweep can "
            "vary only the policy"
        )
    return Questions(
        axes=tuple(axes),
        objectives=objectives(slo) if slo else (),
        changes=tuple(change(each) for each in options.what_if or ()),
    )


def scenario(
    trace: str,
    cluster: SimulatedClusterOptions,
    prices: PriceOptions,
    reading: TraceOptions,
    jobs: JobOptions,
    faults: FaultOptions,
    questions: QuestionOptions,
    running: RunOptions,
) -> Scenario:
    """The base scenario.

    Raises:
        InvalidRequestError: an option is invalid.
    """
    return Scenario(
        source=source(trace, reading, running.seed),
        pools=pools(cluster, prices.price),
        seed=running.seed,
        behaviour=Behaviour(
            jitter=jobs.jitter,
            responses=jobs.responses,
            lengths=lengths(jobs.lengths),
            stalls=stalls(jobs.tool_stalls),
            staleness=jobs.staleness,
        ),
        failures=Failures(
            node_mtbf_s=faults.node_mtbf_hours * HOUR_S,
            repair_s=faults.repair_minutes * 60.0,
            worker_mtbf_s=faults.worker_mtbf_hours * HOUR_S,
            state_survives=faults.state_survives,
        ),
        warm=not jobs.cold,
        rollouts=rollouts(cluster.place_rollouts),
        fills_valleys=cluster.fill_valleys,
        slo=jobs.job_slo,
        switch_s=cluster.switch_s,
        longest_first=cluster.longest_first,
        mixed_sizes=cluster.mixed_sizes,
        starvation_bound_s=cluster.starvation_s,
        detail=detail(running.detail),
        check=running.check,
        window_s=window(questions.window),
        prices=Prices(
            reserved=prices.price_reserved,
            on_demand=prices.price_on_demand,
            rollout=prices.price_rollout,
            reserved_nodes=prices.reserved_nodes,
            horizon_s=None if prices.horizon_days is None else prices.horizon_days * DAY_S,
        ),
    )


def source(trace: str, options: TraceOptions, seed: int) -> Source:
    """The source of the jobs."""
    days = options.days
    shape = Shape(
        compress=options.compress,
        backlog=options.backlog,
        cap_s=None if options.cap_days is None else options.cap_days * DAY_S,
        gpus_min=options.min_gpus,
        duration_s_min=options.min_duration,
        start_s=options.start_day * DAY_S,
    )
    if trace == PUBLISHED:
        return PublishedSource(
            span_s=(options.start_day + (PUBLISHED_DAYS if days is None else days)) * DAY_S,
            jobs_per_day=options.jobs_per_day,
            shape=shape,
            gpus_max=options.max_gpus,
            seed=seed,
        )
    return replace(
        TraceSource.at(trace),
        layout=options.layout,
        skip_bad=options.skip_bad,
        shape=shape,
        gpus_max=options.max_gpus,
        any_node_type=options.any_node_type,
        span_s=None if days is None else days * DAY_S,
        profiles=options.profiles,
        seed=seed,
    )


def pools(options: SimulatedClusterOptions, price: float | None) -> tuple[Pool, ...]:
    """The pools of the cluster.

    Raises:
        InvalidRequestError: a pool or a node type is invalid.
    """
    given = options.pool
    wanted = [_pool(each) for each in given] if given else [(options.node_type, options.nodes)]
    changes: dict[str, float] = {}
    if options.gpus_per_node is not None:
        changes["gpus"] = options.gpus_per_node
    if price is not None:
        changes["price"] = price
    found = []
    for name, count in wanted:
        kind = with_fields(named_type(name), changes, where=f"node type {name!r}")
        found.append(Pool(nodes=count, node_type=kind))
    names = [pool.node_type.name for pool in found]
    if len(set(names)) < len(names):
        raise InvalidRequestError(
            f"pools {', '.join(names)}: a name is repeated; add up the nodes of equal types, or "
            "give types in files distinct names"
        )
    return tuple(found)


def stalls(given: str | None) -> ToolStalls | None:
    """Parse `CHANCE:SECONDS[:SIGMA]`.

    Raises:
        InvalidRequestError: the form or a value is invalid.
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
    """Parse `START:END` in hours into seconds.

    Raises:
        InvalidRequestError: the form or a value is invalid.
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
    """Check the level of detail.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    for known in get_args(Detail):
        if given == known:
            return given  # type: ignore[return-value]  # mypy does not narrow by get_args
    raise InvalidRequestError(f"--detail {given!r}: use {' or '.join(get_args(Detail))}")


def rollouts(given: str) -> RolloutGpus:
    """Check where rollouts run.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    for known in ROLLOUT_GPUS:
        if given == known:
            return known
    raise InvalidRequestError(f"--place-rollouts {given!r}: use one of {', '.join(ROLLOUT_GPUS)}")


def lengths(given: str) -> str:
    """The name of a distribution of lengths, or an absolute path.

    Raises:
        InvalidRequestError: the file does not exist.
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
