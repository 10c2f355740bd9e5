"""Finds the number of nodes that a trace needs for its objectives by simulated runs."""

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
"""Runs scenarios in parallel, like `run_all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The result of the search for one policy."""

    policy: str
    objectives: tuple[Objective, ...]
    search: Search
    """The search by the objectives that more nodes can meet."""
    results: Mapping[int, SimResult]
    """Result of every size that was run."""
    broken_budgets: tuple[Objective, ...] = ()
    """Budgets (objectives that more nodes do not help with) that the found size does not meet. Then
    there is no answer; larger clusters were not tried."""

    @property
    def nodes(self) -> int | None:
        """The smallest cluster that meets all objectives; None: not found."""
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
    """The smallest number of nodes on which `base` meets its objectives.

    Budgets (cost, utilisation, GPU-hours per cycle) are checked only at the size that the other
    objectives need.

    Raises:
        InvalidRequestError: there is no objective to search by, or the range of sizes is empty.
        PlexRLError: a run failed.
    """
    wanted = [objective for objective in objectives if not objective.is_budget]
    if not any(each.metric != "failed_jobs" for each in wanted):
        raise InvalidRequestError(
            "cost and utilisation alone are best on the smallest cluster: add an objective such as "
            "--slo 'wait.p95<=2h'"
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
        broken = tuple(
            objective
            for objective in objectives
            if objective.is_budget and not objective.is_met(found)
        )
    return CapacityPlan(
        policy=base.policy,
        objectives=tuple(objectives),
        search=search,
        results=dict(sorted(results.items())),
        broken_budgets=broken,
    )
