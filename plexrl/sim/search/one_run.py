"""Executes one run of a sweep; a failure becomes a value."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from plexrl.errors import PlexRLError, from_wire
from plexrl.sim.engine.simulate import RunProgress, simulate
from plexrl.sim.metrics.job_rows_file import row_writer
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that ended in an error."""

    scenario: Scenario
    error: PlexRLError = field(compare=False)
    """The error; its message begins with the run's label."""


Outcome = SimResult | FailedRun
OnProgress = Callable[[int, RunProgress], None]
"""Receives the index of a run and its progress."""
OnEnd = Callable[[int, Outcome], None]
"""Receives the index of a run and its outcome, in the order in which runs end."""


def run_one(
    scenario: Scenario, on_progress: Callable[[RunProgress], None], job_rows: Path | None = None
) -> Outcome:
    """Execute a run in this process; a failure becomes a `FailedRun`."""
    try:
        if job_rows is None:
            return simulate(scenario, on_progress)
        with row_writer(job_rows) as take:
            return simulate(scenario, on_progress, on_job=take)
    except PlexRLError as error:
        return failed(scenario, error)
    except Exception as error:
        # A bug in one run must not discard hours of other runs.
        internal = PlexRLError(f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return failed(scenario, internal)


def label(scenario: Scenario) -> str:
    """Text that identifies a run of a sweep."""
    pools = " + ".join(f"{pool.nodes} x {pool.node_type.name}" for pool in scenario.pools)
    return f"{scenario.policy} on {pools}, seed {scenario.seed}"


def failed(scenario: Scenario, error: PlexRLError) -> FailedRun:
    """A `FailedRun` with `error`, whose message begins with the run's label."""
    labelled = from_wire(error.to_wire())
    labelled.message = f"{label(scenario)}: {error.message}"
    labelled.args = (labelled.message,)
    return FailedRun(scenario=scenario, error=labelled)
