"""`plexrl simulate --jobs-out`: a row of each job of each run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from plexrl.cli.simulate.tables import Run, nodes_of
from plexrl.cli.traces.checks import check_out
from plexrl.errors import InvalidRequestError
from plexrl.sim.metrics.job_rows_file import SUFFIXES, RunOfRows, write_job_rows
from plexrl.sim.workload.scenario import Scenario
from plexrl.traces.io.parquet_file import pyarrow_or_refusal


def check_jobs_out(path: Path, trace: str, ray: str | None, out: Path | None) -> None:
    """Before anything runs: the rows can be written, perhaps in the folder `out` of the results,
    which is made with them.

    Raises:
        InvalidRequestError: they cannot, or would be written on other machines.
    """
    if ray is not None:
        raise InvalidRequestError(
            "--jobs-out would be written on Ray's machines, a part on each: leave --ray away"
        )
    check_out(path, trace, SUFFIXES, to_be_made=out)
    if path.name.endswith(".parquet"):
        pyarrow_or_refusal()


def write_rows(path: Path, runs: Sequence[Run], parts: Mapping[Scenario, Path]) -> None:
    """One table of all jobs of the runs, which have written their `parts`.

    Raises:
        InvalidRequestError: it cannot be written.
    """
    write_job_rows(
        path,
        [
            RunOfRows(
                run=number,
                policy=scenario.policy,
                nodes=nodes_of(scenario),
                seed=scenario.seed,
                part=parts[scenario],
            )
            for number, (scenario, _) in enumerate(runs)
        ],
    )
