"""How many nodes a trace needs for its objectives: probes of the search are simulated runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.axes import with_nodes
from plexrl.sim.search.cluster_size_search import NEIGHBOURS, Search, smallest
from plexrl.sim.search.objectives import Objective
from plexrl.sim.search.one_run import FailedRun, Outcome
from plexrl.sim.workload.scenario import Scenario

Runner = Callable[[Sequence[Scenario]], tuple[Outcome, ...]]
"""Runs scenarios side by side, as `run_all` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The answer for one policy."""

    policy: str
    objectives: tuple[Objective, ...]
    search: Search
    """For the objectives that more nodes help with."""
    results: Mapping[int, SimResult]
    """Of every size that was run."""
    broken_budgets: tuple[Objective, ...] = ()
    """Those that more nodes do not help with, and that the size found does not keep: then there is
    no answer, though a larger cluster was not tried."""

    @property
    def nodes(self) -> int | None:
        """The smallest cluster that meets everything; None: none was found."""
        return None if self.broken_budgets else self.search.nodes


def smallest_cluster(
    base: Scenario,
    objectives: Sequence[Objective],
    *,
    lowest: int,
    highest: int,
    run: Runner,
    at_once: int = 1,
    neighbours: int = NEIGHBOURS,
) -> CapacityPlan:
    """The smallest number of nodes on which `base` keeps its objectives.

    Costs, utilisation and GPU-hours per cycle are looked at on the size that the others need.

    Raises:
        InvalidRequestError: no objective is left to search by, or the range of sizes is empty.
        PlexRLError: a run failed.
    """
    wanted = [each for each in objectives if not each.is_budget]
    if not any(each.metric != "failed_jobs" for each in wanted):
        raise InvalidRequestError(
            "say what the cluster is to do, as --slo 'wait.p95<=2h': costs and utilisation alone "
            "are best on the smallest cluster there is"
        )
    results: dict[int, SimResult] = {}

    def meets(sizes: Sequence[int]) -> list[bool]:
        outcomes = run([with_nodes(base, size) for size in sizes])
        for size, outcome in zip(sizes, outcomes, strict=True):
            if isinstance(outcome, FailedRun):
                raise outcome.error
            results[size] = outcome
        return [all(each.is_met(results[size]) for each in wanted) for size in sizes]

    search = smallest(meets, lowest=lowest, highest=highest, at_once=at_once, neighbours=neighbours)
    broken: tuple[Objective, ...] = ()
    if search.nodes is not None:
        found = results[search.nodes]
        broken = tuple(each for each in objectives if each.is_budget and not each.is_met(found))
    return CapacityPlan(
        policy=base.policy,
        objectives=tuple(objectives),
        search=search,
        results=dict(sorted(results.items())),
        broken_budgets=broken,
    )
