"""The tables of a trace: columns, and the validity of rows. Pure.

`docs/traces.md` is the reference for users. A trace is a table of jobs, ordered by `submit_s`;
response lengths are a separate table. Rows are stored as CSV or Parquet with equal values. All
times are in seconds, all sizes in bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Row = TypeVar("Row")
Fault = tuple[str, str]
"""Field and error message."""

TIME_S_MAX = 1e9
COUNT_MAX = (1 << 63) - 1
SEGMENTS_MAX = 64
"""Most segments of one cycle; the limit of the scheduler's demand traces."""
TEXT_CHARACTERS_MAX = 256
TOLERANCE_S = 1e-6
"""Tolerated overlap of segments, because of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSegment:
    """One interval of a cycle in which the job needs its training GPUs."""

    function: str
    """The computation: `log_prob`, `update`, `sync`, or another name of letters, digits, `_`."""
    offset_s: float
    """Seconds from the start of the cycle."""
    duration_s: float
    slack_s: float = 0.0
    """Longest delay that does not extend the cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job of a trace. Unknown texts are empty, unknown numbers None."""

    job_id: str
    submit_s: float
    """Seconds from the start of the trace."""
    gpus: int
    """Training GPUs (or all GPUs, if the source does not distinguish them)."""
    tenant: str = ""
    duration_s: float | None = None
    """Seconds from the first start to the end, on GPUs of its own."""
    cycles: int | None = None
    """Number of RL steps."""
    rollout_gpus: int = 0
    """Rollout GPUs in addition to `gpus`, never shared."""
    node_type: str = ""
    model: str = ""
    """Model class, such as `7B`."""
    state_bytes: int | None = None
    """Bytes of parameters, gradients and optimizer state."""
    period_s: float | None = None
    """Duration of a median cycle."""
    jitter_s: float = 0.0
    """Standard deviation of a cycle's duration."""
    segments: tuple[TraceSegment, ...] = ()
    """Busy segments of a cycle, ordered and disjoint; the rest is rollout, reward, controller."""
    staleness: int = 0
    """Steps that rollouts may run ahead of training; 0: synchronous."""
    priority: int = 0
    slo: float | None = None
    """Greatest waiting / (waiting + running) that it accepts; None: the cluster's bound."""
    wait_s: float | None = None
    """Wait in the source's queue, from submission to start."""
    outcome: str = ""
    """`completed`, `failed` or `cancelled`."""

    @property
    def service_s(self) -> float:
        """Seconds on GPUs of its own: `duration_s`, or else `cycles` periods."""
        if self.duration_s is not None:
            return self.duration_s
        assert self.cycles is not None, f"{self.job_id} has neither a duration nor cycles"
        assert self.period_s is not None, f"{self.job_id} has cycles without a period"
        return self.cycles * self.period_s

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of training and rollout GPUs."""
        return (self.gpus + self.rollout_gpus) * self.service_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLength:
    """One request of a table of response lengths."""

    output_tokens: int
    prompt_tokens: int | None = None
    arrival_s: float | None = None
    group: str = ""
    """Equal for responses to one prompt; empty if the source has no groups."""
    source: str = ""
    """Client or data set."""


ColumnType = Literal["text", "integer", "number", "segments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column and its valid values."""

    name: str
    type: ColumnType
    required: bool = False
    nullable: bool = False
    """An empty cell is None; otherwise it is the row type's default."""
    low: float = 0
    high: float = TIME_S_MAX
    positive: bool = False
    """Whether values must exceed `low`."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Generic[Row]):
    """A kind of file."""

    name: str
    version: int
    row: type[Row]
    columns: tuple[Column, ...]
    faults: Callable[[Mapping[str, Any]], Iterator[Fault]]
    """Faults between the columns of a row whose single values are valid."""
    key: str | None = None
    """Column with unique values."""
    order: str | None = None
    """Column with ascending values."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns in file order."""
        return tuple(column.name for column in self.columns)


def row_faults(
    table: Table[Any], values: Mapping[str, Any], unread: list[Fault] | None = None
) -> list[Fault]:
    """All faults of the typed values of a row; `unread`: faults found while parsing."""
    found = list(unread or ())
    known = {field for field, _ in found}
    for column in table.columns:
        value = values[column.name]
        if value == "" and not column.required:
            # Fast path: most cells of most traces are empty.
            continue
        fault = column_fault(column, value)
        if fault is not None and column.name not in known:
            found.append((column.name, fault))
    # Faults between columns are reported only if each single value is valid.
    return found or list(table.faults(values))


def column_fault(column: Column, value: Any) -> str | None:
    """The fault of one typed value; None: valid."""
    if value is None:
        return None if column.nullable else "is missing"
    match column.type:
        case "text":
            return _text_fault(column, value)
        case "segments":
            return _segments_fault(value)
        case "integer":
            if type(value) is not int:
                return f"is not a whole number: {shown(value)}"
        case "number":
            if type(value) is not float or not math.isfinite(value):
                return f"is not a finite number: {shown(value)}"
    if value < column.low or (column.positive and value <= column.low):
        return f"must be {'more than' if column.positive else 'at least'} {column.low:g}: {value!r}"
    if value > column.high:
        return f"must be at most {column.high:g}: {value!r}"
    return None


def _text_fault(column: Column, value: Any) -> str | None:
    if not isinstance(value, str):
        return f"is not text: {shown(value)}"
    if column.required and not value:
        return "is missing"
    if len(value) > TEXT_CHARACTERS_MAX:
        return f"has {len(value)} characters; at most {TEXT_CHARACTERS_MAX}"
    if not value.isprintable() and any(_is_unwanted(each) for each in value):
        return f"has control characters or is not UTF-8: {shown(value)}"
    if column.choices and value and value not in column.choices:
        return f"must be one of {', '.join(column.choices)}: {shown(value)}"
    return None


def _is_unwanted(character: str) -> bool:
    """Whether it is a control character, or a lone surrogate (a byte that is not UTF-8)."""
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000


def _segments_fault(value: Any) -> str | None:
    if not isinstance(value, tuple):
        return f"is not a list of segments: {shown(value)}"
    if len(value) > SEGMENTS_MAX:
        return f"has {len(value)} segments; at most {SEGMENTS_MAX}: merge neighbours"
    end_s = 0.0
    for index, segment in enumerate(value):
        times = (segment.offset_s, segment.duration_s, segment.slack_s)
        if not all(type(time) is float and 0 <= time <= TIME_S_MAX for time in times):
            return f"segment {index}: times must be finite and at least 0"
        if not is_function(segment.function):
            return f"segment {index}: {shown(segment.function)} is not a name of letters, digits, _"
        if segment.offset_s < end_s - TOLERANCE_S:
            return f"segment {index} starts at {segment.offset_s:g} s, before {end_s:g} s"
        end_s = segment.offset_s + segment.duration_s
    return None


def is_function(name: Any) -> bool:
    """Whether the name is a valid function of a segment."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= TEXT_CHARACTERS_MAX
        and name.isascii()
        and name.replace("_", "a").isalnum()
    )


def shown(value: Any) -> str:
    """A value for a message, in ASCII and not too long."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _job_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    period_s, segments = values["period_s"], values["segments"]
    if values["duration_s"] is None:
        if values["cycles"] is None:
            yield "duration_s", "is missing, and so is cycles: give one of them"
        elif period_s is None:
            yield "period_s", "is missing: without it and duration_s, cycles have no length"
    if values["gpus"] + values["rollout_gpus"] < 1:
        yield "gpus", "must be at least 1 together with rollout_gpus"
    if segments and period_s is None:
        yield "period_s", "is missing: segments lie in a period"
    if segments and period_s is not None:
        end_s = segments[-1].offset_s + segments[-1].duration_s
        if end_s > period_s + TOLERANCE_S:
            yield "segments", f"end at {end_s:g} s, outside the period of {period_s:g} s"


def _no_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    del values
    return iter(())


OUTCOMES = ("completed", "failed", "cancelled")

JOBS: Table[TraceJob] = Table(
    name="jobs",
    version=1,
    row=TraceJob,
    columns=(
        Column(name="job_id", type="text", required=True),
        Column(name="tenant", type="text"),
        Column(name="submit_s", type="number", required=True),
        Column(name="duration_s", type="number", nullable=True, positive=True),
        Column(name="cycles", type="integer", nullable=True, low=1, high=COUNT_MAX),
        Column(name="gpus", type="integer", required=True, high=1e6),
        Column(name="rollout_gpus", type="integer", high=1e6),
        Column(name="node_type", type="text"),
        Column(name="model", type="text"),
        Column(name="state_bytes", type="integer", nullable=True, high=COUNT_MAX),
        Column(name="period_s", type="number", nullable=True, low=1e-3),
        Column(name="jitter_s", type="number"),
        Column(name="segments", type="segments"),
        Column(name="staleness", type="integer", high=1000),
        Column(name="priority", type="integer", low=-1000, high=1000),
        Column(name="slo", type="number", nullable=True, high=0.99),
        Column(name="wait_s", type="number", nullable=True),
        Column(name="outcome", type="text", choices=OUTCOMES),
    ),
    faults=_job_faults,
    key="job_id",
    order="submit_s",
)

LENGTHS: Table[ResponseLength] = Table(
    name="lengths",
    version=1,
    row=ResponseLength,
    columns=(
        Column(name="arrival_s", type="number", nullable=True),
        Column(name="source", type="text"),
        Column(name="group", type="text"),
        Column(name="prompt_tokens", type="integer", nullable=True, high=1e9),
        Column(name="output_tokens", type="integer", required=True, high=1e9),
    ),
    faults=_no_faults,
)

TABLES: dict[str, Table[Any]] = {"jobs": JOBS, "lengths": LENGTHS}
