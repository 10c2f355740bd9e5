"""A scenario from its first job to the end of its last: `simulate(scenario)`."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from plexrl.process.garbage_collection import rare_collections
from plexrl.scheduler.core import core
from plexrl.sim.engine.trace_run import CycleEnded, TraceRun
from plexrl.sim.metrics.job_rows import JobRow
from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.cycles import CycleLaw, Laws
from plexrl.sim.workload.scenario import Scenario

HAPPENINGS = 512
"""From one look at the wall clock to the next."""

REPORT_EACH_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    now_s: float
    """On the virtual clock."""
    jobs_done: int
    jobs_seen: int
    """Submitted so far."""
    events: int
    """Told to the core."""


def simulate(
    scenario: Scenario,
    progress: Callable[[Progress], None] | None = None,
    *,
    laws: Laws = CycleLaw,
    costs: MoveCosts | None = None,
    on_cycle: CycleEnded | None = None,
    on_job: Callable[[JobRow], None] | None = None,
) -> SimResult:
    """Run the scenario to the end of its last job. `progress` is told about twice a second,
    `on_cycle` of every cycle, `on_job` of each job as it ends; `laws` say what cycles take and
    `costs` what moves do, where the scenario is not to.

    Raises:
        InvalidRequestError: there is no such policy.
        UnavailableError: jobs wait, and nothing more can happen.
    """
    began_at = time.perf_counter()
    run = TraceRun(scenario, laws=laws, costs=costs, on_cycle=on_cycle, on_job=on_job)
    with rare_collections():
        run.start()
        reported_at = began_at
        while run.shell.run(HAPPENINGS) == HAPPENINGS:
            if progress is not None and time.perf_counter() - reported_at >= REPORT_EACH_S:
                reported_at = time.perf_counter()
                progress(_progress(run))
        run.check_it_ended()
    if progress is not None:
        progress(_progress(run))
    wall_s = time.perf_counter() - began_at
    return run.result(
        Speed(
            wall_s=wall_s,
            events_per_s=run.shell.events / max(wall_s, 1e-9),
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            compiled=is_compiled(),
        )
    )


def is_compiled() -> bool:
    """Whether the scheduler's core is a C extension (`make compiled`); it decides alike."""
    return not core.__file__.endswith(".py")


def _progress(run: TraceRun) -> Progress:
    return Progress(
        now_s=run.shell.now,
        jobs_done=run.jobs_done,
        jobs_seen=run.jobs_seen,
        events=run.shell.events,
    )
