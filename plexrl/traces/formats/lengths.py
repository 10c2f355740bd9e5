"""Column layouts of public traces of response lengths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plexrl.errors import TraceError
from plexrl.traces.formats.records import Fields, csv_records
from plexrl.traces.generate.distributions import Histogram
from plexrl.traces.io.problems import Problem, Problems

OUTPUT = (
    "output_tokens",
    "GeneratedTokens",
    "output_length",
    "num_decode_tokens",
    "Response tokens",
)
PROMPT = ("prompt_tokens", "ContextTokens", "input_length", "num_prefill_tokens", "Request tokens")
ARRIVAL = ("arrival_s", "arrived_at", "Timestamp", "TIMESTAMP", "timestamp")
SECONDS = ("arrival_s", "arrived_at", "Timestamp")
"""Names of arrivals in seconds."""
SOURCE = ("client", "source", "Model")
FAILED = "failed: it has no response"
"""Reason why a row of BurstGPT is left out."""


def source_fields(names: Sequence[str]) -> dict[str, str]:
    """Source column by field, for a file with these columns."""
    ours = {
        "output_tokens": OUTPUT,
        "prompt_tokens": PROMPT,
        "arrival_s": ARRIVAL,
        "source": SOURCE,
    }
    return {
        field: next((name for name in theirs if name in names), field)
        for field, theirs in ours.items()
    }


def requests(fields: Fields) -> dict[str, Any] | str:
    """A row of Azure, BurstGPT, Mooncake or vidur, by the column names that exist.

    BurstGPT lists failed requests with a response of 0 tokens; these are left out.
    """
    values: dict[str, Any] = {"output_tokens": fields.integer(_first(fields, OUTPUT))}
    if any(fields.has(name) for name in PROMPT):
        values["prompt_tokens"] = fields.integer(_first(fields, PROMPT))
    if fields.exists("Response tokens") and not fields.faults and not values["output_tokens"]:
        return FAILED
    if any(fields.has(name) for name in SECONDS):
        values["arrival_s"] = fields.number(_first(fields, ARRIVAL))
    elif fields.has("TIMESTAMP"):
        values["arrival_s"] = fields.time("TIMESTAMP")
    elif fields.has("timestamp"):
        # Mooncake has milliseconds from the start.
        values["arrival_s"] = fields.number("timestamp") / 1000.0
    values["source"] = next((fields.text(name) for name in SOURCE if fields.has(name)), "")
    return values


def read_histogram(path: Path) -> Histogram:
    """Read a histogram of lengths: output_tokens_from, output_tokens_to, probability.

    Raises:
        TraceError: rows are bad, or there are none.
    """
    problems = Problems()
    bins: list[tuple[float, float, float]] = []
    last = -1
    for line, cells in csv_records(path, problems, None):
        fields = Fields(cells)
        low = fields.integer("output_tokens_from")
        high = fields.integer("output_tokens_to")
        part = fields.number("probability")
        if not fields.faults and (high < low or low < 0 or part < 0 or low <= last):
            fields.faults.append(("output_tokens_from", "is not a bin after the one before"))
        for field, message in fields.faults:
            problems(Problem(line=line, field=field, message=message))
        if not fields.faults:
            bins.append((float(low), float(high), part))
            last = high
    if problems.count:
        raise problems.error(str(path))
    if not sum(part for _, _, part in bins):
        raise TraceError(f"{path} has no bins of a probability above 0")
    return Histogram(bins=tuple(bins))


def _first(fields: Fields, names: tuple[str, ...]) -> str:
    """The first name with a value; else the first existing one, for the error message."""
    present = (*(n for n in names if fields.has(n)), *(n for n in names if fields.exists(n)))
    return next(iter(present), names[0])
