"""Loads a file of a known column layout as rows of this schema."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces.formats import jobs, lengths, philly_log, servegen
from plexrl.traces.formats.nearest import nearest
from plexrl.traces.formats.records import Fields, Record, csv_records, json_records
from plexrl.traces.formats.sorting import by_submission
from plexrl.traces.io.cells import defaults
from plexrl.traces.io.csv_file import Parsed
from plexrl.traces.io.file_header import (
    Header,
    Kind,
    column_faults,
    header_error,
    other_separator,
    read_header,
)
from plexrl.traces.io.files import checked
from plexrl.traces.io.problems import NO_ROWS, Problem, Problems, Report
from plexrl.traces.schema import JOBS, LENGTHS, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A column layout of a public source."""

    table: Table[Any]
    """Table of this schema that the rows convert to."""
    columns: tuple[tuple[str, ...], ...]
    """Required columns, each with its possible names."""
    row: Callable[[Fields], dict[str, Any] | str]
    """Converts a row to field values, or to the reason why it is excluded."""
    source: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """Source column by field, for error messages in the source's names."""
    names: tuple[str, ...] | None = None
    """Column names, if the files have no header line."""
    kind: Kind = "csv"
    """Kind of its files; layouts of records are also read from JSON lines."""


def _each(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((name,) for name in names)


_SLURM = ("job_id", "user", "gpu_num", "state", "submit_time", "duration")
_SLURM_FIELDS = {
    "tenant": "vc",
    "submit_s": "submit_time",
    "duration_s": "duration",
    "gpus": "gpu_num",
    "model": "type",
    "wait_s": "queue",
}

FORMATS: dict[str, Format] = {
    "philly": Format(
        table=JOBS,
        # `submit_time` distinguishes it from this schema with a misspelt column.
        columns=_each("job_id", "tenant", "submit_time", "submit_s", "duration_s", "gpus"),
        row=jobs.philly,
        source="Microsoft Philly (ATC'19), as it is bundled",
    ),
    "philly-flat": Format(
        table=JOBS,
        columns=_each("timestamp", "duration", "num_gpus", "gpu_time", "cluster"),
        row=jobs.philly_flat,
        source="Microsoft Philly, the flat copy of Pollux and Sia, philly.csv",
        fields={
            "tenant": "cluster",
            "submit_s": "timestamp",
            "duration_s": "duration",
            "gpus": "num_gpus",
        },
    ),
    "philly-log": Format(
        table=JOBS,
        columns=_each(*philly_log.NAMES),
        row=philly_log.philly_log,
        source="Microsoft Philly as released, cluster_job_log",
        fields={
            "job_id": "jobid",
            "tenant": "vc",
            "submit_s": "submitted_time",
            "duration_s": philly_log.RUN_S,
            "gpus": philly_log.GPUS,
            "wait_s": philly_log.FIRST_START,
        },
        kind="json list",
    ),
    "helios": Format(
        table=JOBS,
        columns=_each(*_SLURM, "vc"),
        row=jobs.slurm,
        source="SenseTime Helios (SC'21), cluster_log.csv",
        fields=_SLURM_FIELDS,
    ),
    "acme": Format(
        table=JOBS,
        columns=_each(*_SLURM, "type", "gpu_time"),
        row=jobs.slurm,
        source="Shanghai AI Lab Acme (NSDI'24), trace_seren.csv and trace_kalos.csv",
        fields={**_SLURM_FIELDS, "tenant": "user"},
    ),
    "alibaba-2020": Format(
        table=JOBS,
        columns=_each(*jobs.PAI_TASK_COLUMNS),
        row=jobs.alibaba_2020,
        source="Alibaba PAI 2020 (NSDI'22), pai_task_table.csv",
        fields={
            "job_id": "job_name",
            "submit_s": "start_time",
            "duration_s": "end_time",
            "gpus": "plan_gpu",
            "node_type": "gpu_type",
        },
        names=jobs.PAI_TASK_COLUMNS,
    ),
    "alibaba-2023": Format(
        table=JOBS,
        columns=_each(
            *("name", "num_gpu", "creation_time", "deletion_time", "scheduled_time", "pod_phase")
        ),
        row=jobs.alibaba_2023,
        source="Alibaba GPU cluster 2023 (ATC'23), openb_pod_list_*.csv",
        fields={
            "job_id": "name",
            "submit_s": "creation_time",
            "duration_s": "deletion_time",
            "gpus": "num_gpu",
            "node_type": "gpu_spec",
            "wait_s": "scheduled_time",
        },
    ),
    "alibaba-2026": Format(
        table=JOBS,
        columns=_each(
            *("job_name", "gpu_request", "worker_num", "submit_time", "duration", "job_type")
        ),
        row=jobs.alibaba_2026,
        source="Alibaba spot GPU 2026 (ASPLOS'26), job_info_df.csv",
        fields={
            "job_id": "job_name",
            "tenant": "organization",
            "submit_s": "submit_time",
            "duration_s": "duration",
            "gpus": "gpu_request",
            "node_type": "gpu_model",
        },
    ),
    "requests": Format(
        table=LENGTHS,
        columns=(lengths.OUTPUT, lengths.PROMPT),
        row=lengths.requests,
        source="Azure, BurstGPT, Mooncake or vidur: lengths of requests",
    ),
    "servegen": Format(
        table=LENGTHS,
        columns=((servegen.OUTPUT,),),
        row=lengths.requests,
        source="ServeGen, chunk-N-dataset.json or a folder of them: requests are drawn",
        kind="json object",
    ),
}
"""Layouts by the names of `plexrl traces convert --from`."""


SHOWN_NAMES = 12
"""Most columns of an unknown header that its error message lists."""

DATES_FROM_S = 1e8
"""Larger values are dates in seconds since 1970: no trace of requests lasts three years."""

_UNORDERED = replace(
    JOBS,
    order=None,
    columns=tuple(
        # On the source's clock: perhaps since 1970, perhaps negative.
        replace(column, low=-1e15, high=1e15) if column.name == "submit_s" else column
        for column in JOBS.columns
    ),
)


@dataclass(slots=True)
class Loaded:
    """A file being read; the other fields are complete after `rows` is consumed."""

    table: Table[Any]
    rows: Iterator[Any]
    problems: Problems
    left_out: Counter[str] = field(default_factory=Counter)
    """Excluded rows by reason."""


def detect(path: Path) -> str | None:
    """The name of the layout of a file; None if none fits."""
    if servegen.client_files(path):
        return "servegen"
    header = read_header(path)
    names = set(header.names)
    kind = "json list" if header.kind == "json list" else "csv"
    for name, known in FORMATS.items():
        if kind == known.kind and all(names & set(column) for column in known.columns):
            return name
    return "alibaba-2020" if jobs.is_pai_task(header.names) else None


def unknown_layout(path: Path) -> InvalidRequestError:
    """The error of an unknown header: the nearest layouts and all known ones."""
    header = read_header(path)
    shown = ", ".join(map(ascii, header.names[:SHOWN_NAMES]))
    more = ", …" if len(header.names) > SHOWN_NAMES else ""
    message = f"{path}: no known trace has these columns ({shown}{more})"
    separator = other_separator(header)
    if separator:
        return InvalidRequestError(
            f"{message}: cells are separated by {separator}; save it with commas"
        )
    layouts = {
        "jobs": tuple((each.name,) for each in JOBS.columns if each.required),
        **{name: known.columns for name, known in FORMATS.items() if known.kind != "json object"},
    }
    near = " or ".join(
        f"{name} (it also needs {', '.join(missing)})"
        for name, missing in nearest(header.names, layouts)
        if missing
    )
    message += f"; nearest is {near}: rename columns that differ" if near else ""
    return InvalidRequestError(
        f"{message}. --from knows jobs, lengths (docs/traces.md), {', '.join(FORMATS)}, wandb"
    )


def load(
    path: str | Path,
    name: str | None = None,
    on_problem: Report | None = None,
    draw: servegen.Draw | None = None,
) -> Loaded:
    """The rows of a public trace: jobs in order of submission, lengths in file order.

    Bad rows are reported by line and source column, and skipped. `draw`: number of requests to draw
    from a source of distributions.

    Raises:
        InvalidRequestError: the layout is unknown, or none fits the file's header.
        TraceError: the header does not fit the layout.
    """
    path = Path(path)
    name = name or detect(path)
    if name is None:
        raise unknown_layout(path)
    if name not in FORMATS:
        raise InvalidRequestError(
            f"unknown layout {name!r}: use jobs, lengths, {', '.join(FORMATS)}, wandb"
        )
    known = FORMATS[name]
    problems = Problems(on_problem)
    loaded = Loaded(table=known.table, rows=iter(()), problems=problems)
    if name == "servegen":
        loaded.rows = _draw(path, draw or servegen.Draw())
        return loaded
    records, header = _records(path, name, problems)
    parsed = _parse(_not_empty(records, header, problems), known, loaded.left_out)
    if known.table is LENGTHS:
        report = _by_source_column(problems, lengths.source_fields(header.names))
        loaded.rows = checked(_relative(parsed), LENGTHS, report)
    else:
        # Rows are unordered, and times are on the source's clock, until they are sorted.
        unordered = checked(parsed, _UNORDERED, _by_source_column(problems, known.fields))
        loaded.rows = by_submission(unordered)
    return loaded


def _draw(path: Path, draw: servegen.Draw) -> Iterator[Any]:
    files = servegen.client_files(path)
    if not files:
        raise TraceError(
            f"{path} is neither a client's chunk-N-dataset.json of ServeGen nor a folder of them"
        )
    return servegen.draw_requests(files, draw)


def _by_source_column(report: Report, fields: Mapping[str, str]) -> Report:
    """A report that names the source's columns instead of this schema's fields."""

    def translated(problem: Problem) -> None:
        report(replace(problem, field=fields.get(problem.field, problem.field)))

    return translated


def _records(path: Path, name: str, report: Report) -> tuple[Iterator[Record], Header]:
    known = FORMATS[name]
    header = read_header(path)
    if known.names is not None and set(header.names) != set(known.names):
        if not jobs.is_pai_task(header.names):
            faults = [("", f"is neither the header of {name} nor one of its rows")]
            raise header_error(path, header.line, faults)
        return csv_records(path, report, known.names), header
    expected = ("json list",) if known.kind == "json list" else ("csv", "json lines")
    if header.kind not in expected:
        raise header_error(
            path, header.line, [("", f"begins a {header.kind}; {name} is {' or '.join(expected)}")]
        )
    faults = column_faults(header, known.columns, name)
    if faults:
        fits = detect(path)
        other = [("", f"its columns are not those of {name} but of --from {fits}")]
        raise header_error(path, header.line, other if fits not in (None, name) else faults)
    if header.kind == "json list":
        return philly_log.philly_log_records(path, report), header
    if header.kind == "json lines":
        return json_records(path, report), header
    return csv_records(path, report, None), header


def _not_empty(records: Iterator[Record], header: Header, problems: Problems) -> Iterator[Record]:
    """The records; a file without any is reported."""
    first = next(records, None)
    if first is None:
        if not problems.count:
            problems(Problem(line=header.line, field="", message=NO_ROWS))
        return
    yield first
    yield from records


def _parse(records: Iterator[Record], known: Format, left_out: Counter[str]) -> Iterator[Parsed]:
    absent = defaults(known.table)
    for line, cells in records:
        fields = Fields(cells, line)
        values = known.row(fields)
        if isinstance(values, str):
            left_out[values] += 1
            continue
        yield line, {**absent, **values}, fields.faults


def _relative(parsed: Iterator[Parsed]) -> Iterator[Parsed]:
    """Shift arrivals that are dates to start at 0; leave others unchanged."""
    start_s: float | None = None
    for line, values, faults in parsed:
        arrival_s = values["arrival_s"]
        if arrival_s is not None and not faults:
            if start_s is None:
                start_s = arrival_s if arrival_s > DATES_FROM_S else 0.0
            if start_s:
                values["arrival_s"] = round(arrival_s - start_s, 6)
        yield line, values, faults
