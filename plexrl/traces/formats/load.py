"""From a file of a known column layout to rows of our tables."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.traces.cells import defaults
from plexrl.traces.csv_file import Parsed
from plexrl.traces.files import checked
from plexrl.traces.formats import jobs, lengths
from plexrl.traces.formats.records import Fields, Record, csv_records, header, json_records
from plexrl.traces.problems import Problems, Report
from plexrl.traces.schema import JOBS, LENGTHS, Table
from plexrl.traces.sorting import by_submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A column layout of somebody else's."""

    table: Table[Any]
    """Of ours, that its rows become rows of."""
    columns: tuple[tuple[str, ...], ...]
    """By which it is known: each a column, or several names that it may have."""
    row: Callable[[Fields], dict[str, Any] | str]
    """Our values of one of its rows, or why the row is left out."""
    source: str
    names: tuple[str, ...] | None = None
    """Of its columns, where its files have no header line."""


_SLURM = ("job_id", "user", "gpu_num", "state", "submit_time", "duration")

FORMATS: dict[str, Format] = {
    "philly": Format(
        table=JOBS,
        # `submit_time` tells it from a table of ours with a misspelt column.
        columns=tuple(
            (name,)
            for name in ("job_id", "tenant", "submit_time", "submit_s", "duration_s", "gpus")
        ),
        row=jobs.philly,
        source="Microsoft Philly (ATC'19), in the flat form",
    ),
    "helios": Format(
        table=JOBS,
        columns=tuple((name,) for name in (*_SLURM, "vc")),
        row=jobs.slurm,
        source="SenseTime Helios (SC'21), cluster_log.csv",
    ),
    "acme": Format(
        table=JOBS,
        columns=tuple((name,) for name in (*_SLURM, "type", "gpu_time")),
        row=jobs.slurm,
        source="Shanghai AI Lab Acme (NSDI'24), trace_seren.csv and trace_kalos.csv",
    ),
    "alibaba-2020": Format(
        table=JOBS,
        columns=tuple((name,) for name in jobs.PAI_TASK_COLUMNS),
        row=jobs.alibaba_2020,
        source="Alibaba PAI 2020 (NSDI'22), pai_task_table.csv",
        names=jobs.PAI_TASK_COLUMNS,
    ),
    "alibaba-2023": Format(
        table=JOBS,
        columns=tuple(
            (name,) for name in ("name", "num_gpu", "creation_time", "deletion_time", "pod_phase")
        ),
        row=jobs.alibaba_2023,
        source="Alibaba GPU cluster 2023 (ATC'23), openb_pod_list_*.csv",
    ),
    "alibaba-2026": Format(
        table=JOBS,
        columns=tuple(
            (name,) for name in ("job_name", "gpu_request", "worker_num", "submit_time", "job_type")
        ),
        row=jobs.alibaba_2026,
        source="Alibaba spot GPU 2026 (ASPLOS'26), job_info_df.csv",
    ),
    "requests": Format(
        table=LENGTHS,
        columns=(lengths.OUTPUT, lengths.PROMPT),
        row=lengths.requests,
        source="Azure, Mooncake, ServeGen or vidur: lengths of requests",
    ),
}
"""By the names that `plexrl traces convert --from` takes."""


DATES_FROM_S = 1e8
"""Seconds beyond this are a date since 1970: no trace of requests is three years long."""

_UNORDERED = replace(
    JOBS,
    order=None,
    columns=tuple(
        # In the source's own clock, perhaps since 1970, perhaps below 0.
        replace(column, low=-1e15, high=1e15) if column.name == "submit_s" else column
        for column in JOBS.columns
    ),
)


@dataclass(slots=True)
class Loaded:
    """A file being read: iterate `rows`, then look at the rest."""

    table: Table[Any]
    rows: Iterator[Any]
    problems: Problems
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows that are no jobs of ours, by reason."""


def detect(path: Path) -> str | None:
    """The name of the layout that a file's header shows; None where none fits."""
    names = set(header(path))
    for name, known in FORMATS.items():
        if all(names & set(column) for column in known.columns):
            return name
    return None


def load(path: str | Path, name: str | None = None, on_problem: Report | None = None) -> Loaded:
    """The rows of a public trace: jobs in order of submission, lengths as they stand.

    Bad rows are reported by their line and the source's own field, and left out.

    Raises:
        InvalidRequestError: no such layout, or none fits the file's header.
    """
    path = Path(path)
    name = name or detect(path)
    if name is None:
        raise InvalidRequestError(
            f"{path}: its header is that of no known trace; say which by --from: "
            f"{', '.join(FORMATS)}"
        )
    if name not in FORMATS:
        raise InvalidRequestError(f"no layout is called {name!r}: use {', '.join(FORMATS)}")
    known = FORMATS[name]
    loaded = Loaded(table=known.table, rows=iter(()), problems=Problems(on_problem))
    records = _records(path, known, loaded.problems)
    parsed = _parsed(records, known, loaded.left_out)
    if known.table is LENGTHS:
        loaded.rows = checked(_relative(parsed), LENGTHS, loaded.problems)
    else:
        # Sources are not in our order, nor are their times of ours before they are sorted.
        unordered = checked(parsed, _UNORDERED, loaded.problems)
        loaded.rows = by_submission(unordered)
    return loaded


def _records(path: Path, known: Format, report: Report) -> Iterator[Record]:
    first = header(path)
    if known.names is not None and set(first) != set(known.names):
        return csv_records(path, report, known.names)
    missing = ["/".join(names) for names in known.columns if not set(names) & set(first)]
    if missing:
        raise InvalidRequestError(f"{path} has no column {', '.join(missing)}, which it must have")
    if path.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        return json_records(path, report)
    return csv_records(path, report, None)


def _parsed(records: Iterator[Record], known: Format, left_out: Counter[str]) -> Iterator[Parsed]:
    absent = defaults(known.table)
    for line, cells in records:
        fields = Fields(cells)
        values = known.row(fields)
        if isinstance(values, str):
            left_out[values] += 1
            continue
        yield line, {**absent, **values}, fields.faults


def _relative(parsed: Iterator[Parsed]) -> Iterator[Parsed]:
    """Arrivals that are dates come to count from the first; others stay as they are."""
    start_s: float | None = None
    for line, values, faults in parsed:
        arrival_s = values["arrival_s"]
        if arrival_s is not None and not faults:
            if start_s is None:
                start_s = arrival_s if arrival_s > DATES_FROM_S else 0.0
            if start_s:
                values["arrival_s"] = round(arrival_s - start_s, 6)
        yield line, values, faults
