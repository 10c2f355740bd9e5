"""`plexrl simulate --jobs-out`: writes one row for each job of each run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from plexrl.cli.simulate.tables import Run, nodes_of
from plexrl.cli.traces.checks import check_out
from plexrl.errors import InvalidRequestError
from plexrl.sim.metrics.job_rows_file import SUFFIXES, RunOfRows, write_job_rows
from plexrl.sim.workload.scenario import Scenario
from plexrl.traces.io.parquet_file import pyarrow_or_refusal


def check_jobs_out(path: Path, trace: str, ray: str | None, out: Path | None) -> None:
    """Check before the runs that the rows can be written; their folder may be `out`, which the
    command creates.

    Raises:
        InvalidRequestError: they cannot, or the runs would write them on other machines.
    """
    if ray is not None:
        raise InvalidRequestError("--jobs-out would be written in parts on Ray's nodes: omit --ray")
    check_out(path, trace, SUFFIXES, to_be_made=out)
    if path.name.endswith(".parquet"):
        pyarrow_or_refusal()


def write_rows(path: Path, runs: Sequence[Run], parts: Mapping[Scenario, Path]) -> None:
    """Write one table of all jobs of the runs from the files in `parts`.

    Raises:
        InvalidRequestError: the table cannot be written.
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
