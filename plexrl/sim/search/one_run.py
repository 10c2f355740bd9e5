"""One run of a sweep, its failure as a value."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from plexrl.errors import PlexRLError, from_wire
from plexrl.sim.engine.simulate import Progress, simulate
from plexrl.sim.metrics.job_rows_file import row_writer
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that came to no result."""

    scenario: Scenario
    error: PlexRLError = field(compare=False)
    """What went wrong; the message begins with which run it was."""


Outcome = SimResult | FailedRun
OnProgress = Callable[[int, Progress], None]
"""Told the number of a run and how far it is."""
OnEnd = Callable[[int, Outcome], None]
"""Told the number of a run and what came of it, in the order in which runs end."""


def run_one(
    scenario: Scenario, on_progress: Callable[[Progress], None], job_rows: Path | None = None
) -> Outcome:
    """One run here, its failure as a value."""
    try:
        if job_rows is None:
            return simulate(scenario, on_progress)
        with row_writer(job_rows) as take:
            return simulate(scenario, on_progress, on_job=take)
    except PlexRLError as error:
        return failed(scenario, error)
    except Exception as error:
        # A fault of ours in one run must not cost the others' hours.
        told = PlexRLError(f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return failed(scenario, told)


def label(scenario: Scenario) -> str:
    """Which run of a sweep a scenario is, for people."""
    pools = " + ".join(f"{pool.nodes} x {pool.node_type.name}" for pool in scenario.pools)
    return f"{scenario.policy} on {pools}, seed {scenario.seed}"


def failed(scenario: Scenario, error: PlexRLError) -> FailedRun:
    """The run that ended with `error`, whose message then says which run it was."""
    said = from_wire(error.to_wire())
    said.message = f"{label(scenario)}: {error.message}"
    said.args = (said.message,)
    return FailedRun(scenario=scenario, error=said)
