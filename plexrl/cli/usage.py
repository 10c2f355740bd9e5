"""`plexrl usage`: who used how much."""

import csv
import io
from enum import StrEnum
from typing import Annotated, Any

import typer

from plexrl.cli.context import DATA_DIR, DataDir, Json, Key, Output, Url, open_cluster, write_text

COUNTS = ("operations", "failed", "tokens", "gpu_seconds")
HOUR_S = 3600.0


class By(StrEnum):
    TENANT = "tenant"
    JOB = "job"
    KIND = "kind"


KEYS = {By.TENANT: ("tenant",), By.JOB: ("tenant", "job", "name"), By.KIND: ("kind",)}
"""What tells the rows of each sum apart."""


def usage(
    by: Annotated[By, typer.Option(help="Add up by this.")] = By.JOB,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """GPU-hours, operations and tokens used: one's own, or all for the operator."""
    if as_csv and as_json:
        raise typer.BadParameter("--csv and --json are two formats: choose one")
    with open_cluster(url, api_key, data_dir) as cluster:
        rows = add_up(cluster.usage(), by)
    columns = (*KEYS[by], "gpu_hours", *COUNTS)
    if as_csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(text.getvalue())
        return
    cells = [
        (*(row[key] for key in KEYS[by]), f"{row['gpu_hours']:.4f}", *_counts(row))
        for row in [*rows, _total(rows, by)]
    ]
    headings = (*KEYS[by], "GPU-hours", "operations", "failed", "tokens")
    Output(as_json).table("Usage", headings, cells, rows)


def add_up(usage_rows: list[dict[str, Any]], by: By) -> list[dict[str, Any]]:
    """The sums of the scheduler's rows, in the order in which their keys first appear."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in usage_rows:
        key = tuple(row[name] for name in KEYS[by])
        total = found.setdefault(
            key, {**dict(zip(KEYS[by], key, strict=True)), **dict.fromkeys(COUNTS, 0)}
        )
        for name in COUNTS:
            total[name] += row[name]
    return [{**row, "gpu_hours": row["gpu_seconds"] / HOUR_S} for row in found.values()]


def _total(rows: list[dict[str, Any]], by: By) -> dict[str, Any]:
    first, *rest = KEYS[by]
    names = ("gpu_hours", *COUNTS)
    sums = {name: sum(row[name] for row in rows) for name in names}
    return {first: "all", **dict.fromkeys(rest, ""), **sums}


def _counts(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["operations"], row["failed"], row["tokens"]
