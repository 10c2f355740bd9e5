"""Entry point of the simulator: `simulate(scenario)` runs a scenario to the end of its last job."""

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.process.garbage_collection import rare_collections
from plexrl.scheduler.core import core
from plexrl.sim.engine.trace_run import CycleEnded, TraceRun
from plexrl.sim.engine.unshared.run import UnsharedRun
from plexrl.sim.metrics.job_rows import JobRow
from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.cycles import CycleDistribution, CycleFactory
from plexrl.sim.workload.policies import UNSHARED
from plexrl.sim.workload.scenario import Scenario

CALLS_PER_CHECK = 512
"""Scheduled calls between two readings of the wall clock."""

REPORT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run."""

    now_s: float
    """Time on the virtual clock."""
    jobs_done: int
    jobs_seen: int
    """Jobs submitted so far."""
    events: int
    """Events that the core has handled."""


def simulate(
    scenario: Scenario,
    progress: Callable[[RunProgress], None] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    cycle_factory: CycleFactory = CycleDistribution,
    costs: MoveCosts | None = None,
    on_cycle: CycleEnded | None = None,
    on_job: Callable[[JobRow], None] | None = None,
) -> SimResult:
    """Run the scenario to the end of its last job.

    `progress` is called about twice a second, `on_cycle` after every cycle and `on_job` after every
    job; under `easy` and `conservative`, which take seconds, only `on_job`. `settings` replace the
    policy's settings of the scheduler; `cycle_factory` and `costs` the scenario's own durations of
    cycles and of moves.

    Raises:
        InvalidRequestError: the policy is unknown, or knows nothing of a part of the scenario.
        UnavailableError: jobs are left and no event is pending.
    """
    began_at = time.perf_counter()
    if scenario.policy in UNSHARED:
        unshared = UnsharedRun(scenario, cycle_factory=cycle_factory, costs=costs, on_job=on_job)
        return unshared.result(lambda: _speed(began_at, unshared.cycles))
    run = TraceRun(
        scenario,
        settings=settings,
        cycle_factory=cycle_factory,
        costs=costs,
        on_cycle=on_cycle,
        on_job=on_job,
    )
    with rare_collections():
        run.start()
        reported_at = began_at
        while run.shell.run(CALLS_PER_CHECK) == CALLS_PER_CHECK:
            if progress is not None and time.perf_counter() - reported_at >= REPORT_INTERVAL_S:
                reported_at = time.perf_counter()
                progress(_progress(run))
        run.check_it_ended()
    if progress is not None:
        progress(_progress(run))
    return run.result(_speed(began_at, run.shell.events))


def _speed(began_at: float, events: int) -> Speed:
    wall_s = time.perf_counter() - began_at
    return Speed(
        wall_s=wall_s,
        events_per_s=events / max(wall_s, 1e-9),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        compiled=is_compiled(),
    )


def is_compiled() -> bool:
    """Whether the scheduler's core is a C extension (`make compiled`), with equal decisions."""
    return not core.__file__.endswith(".py")


def _progress(run: TraceRun) -> RunProgress:
    return RunProgress(
        now_s=run.shell.now,
        jobs_done=run.jobs_done,
        jobs_seen=run.jobs_seen,
        events=run.shell.events,
    )
