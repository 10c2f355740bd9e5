"""`plexrl usage`: GPU-hours, operations and tokens by tenant, job or kind."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from plexrl.cli.terminal.context import (
    Access,
    Output,
    print_line,
    print_table,
    write_csv,
    write_json,
)
from plexrl.cli.terminal.option_groups import with_option_groups

COUNTS = ("operations", "failed", "tokens", "gpu_seconds")
SHARED = ("isolated_gpu_hours", "held_gpu_hours", "saved_gpu_hours")
"""Figures of whole jobs, which sums by kind of operation lack."""
HOUR_S = 3600.0


class By(StrEnum):
    TENANT = "tenant"
    JOB = "job"
    KIND = "kind"


KEYS = {By.TENANT: ("tenant",), By.JOB: ("tenant", "job", "name"), By.KIND: ("kind",)}
"""Key columns of each kind of sum."""


@with_option_groups
def usage(
    by: Annotated[By, typer.Option(help="What to add up by.")] = By.JOB,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    *,
    access: Access,
    output: Output,
) -> None:
    """GPU-hours, operations and tokens used, and GPU-hours saved by sharing: one's own, or all for
    the operator."""
    if as_csv and output.as_json:
        raise typer.BadParameter("--csv and --json are two formats: choose one")
    with access.open() as cluster:
        rows = add_up(cluster.usage(), by)
        if by is not By.KIND:
            rows = with_sharing(rows, cluster.sharing(), by)
    shared = () if by is By.KIND else SHARED
    columns = (*KEYS[by], "gpu_hours", *COUNTS, *shared, "paced_gpu_hours")
    if as_csv:
        write_csv(columns, [[row[name] for name in columns] for row in rows])
        return
    if output.as_json:
        write_json(rows)
        return
    total = _total(rows, by)
    keys = tuple(key for key in KEYS[by] if key != "name")
    hours = tuple(name for name in ("gpu_hours", "saved_gpu_hours") if name in columns)
    cells = [
        (
            *(row[key] for key in keys),
            *(f"{row[name]:.4f}" for name in hours),
            *(row[name] for name in COUNTS[:3]),
        )
        for row in [*rows, total]
    ]
    headings = (*keys, *("GPU-hours", "saved")[: len(hours)], *COUNTS[:3])
    print_table("", headings, cells)
    if total["paced_gpu_hours"]:
        print_line(
            f"{total['paced_gpu_hours']:.4f} of the GPU-hours are of paced jobs, whose GPUs "
            "computed nothing."
        )
    if shared:
        isolated, held, saved = (f"{total[name]:.4f}" for name in SHARED)
        print_line(
            f"Sharing saved {saved} GPU-hours: on groups of their own the jobs would have held "
            f"{isolated}, and they held {held}."
        )


def with_sharing(
    rows: list[dict[str, Any]], sharing: Sequence[Mapping[str, Any]], by: By
) -> list[dict[str, Any]]:
    """`rows` with the GPU-hours that their jobs would have held alone, held and saved. A job that
    held GPUs without running anything gets a row."""
    found = {tuple(row[name] for name in KEYS[by]): {**row} for row in rows}
    for row in found.values():
        row.update(dict.fromkeys(SHARED, 0.0))
    for each in sharing:
        key = tuple(each[name] for name in KEYS[by])
        empty = dict.fromkeys((*COUNTS, "gpu_hours", "paced_gpu_hours", *SHARED), 0)
        row = found.setdefault(key, {**dict(zip(KEYS[by], key, strict=True)), **empty})
        for name in SHARED:
            row[name] += each[name.replace("_hours", "_seconds")] / HOUR_S
    return list(found.values())


def add_up(usage_rows: Sequence[Mapping[str, Any]], by: By) -> list[dict[str, Any]]:
    """Sums of the scheduler's rows by key, in the order of first appearance."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in usage_rows:
        key = tuple(row[name] for name in KEYS[by])
        total = found.setdefault(
            key,
            {
                **dict(zip(KEYS[by], key, strict=True)),
                **dict.fromkeys(COUNTS, 0),
                "paced_gpu_hours": 0.0,
            },
        )
        for name in COUNTS:
            total[name] += row[name]
        total["paced_gpu_hours"] += row["gpu_seconds"] / HOUR_S if row["paced"] else 0.0
    return [{**row, "gpu_hours": row["gpu_seconds"] / HOUR_S} for row in found.values()]


def _total(rows: list[dict[str, Any]], by: By) -> dict[str, Any]:
    first, *rest = KEYS[by]
    names = ("gpu_hours", "paced_gpu_hours", *COUNTS, *(() if by is By.KIND else SHARED))
    sums = {name: sum(row[name] for row in rows) for name in names}
    return {first: "all", **dict.fromkeys(rest, ""), **sums}
