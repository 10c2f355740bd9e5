"""`plexrl usage`: GPU-hours, operations and tokens by tenant, user, job or kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from plexrl.cli.terminal.context import (
    Access,
    Cells,
    Output,
    print_line,
    print_records,
    print_table,
    seconds,
    write_csv,
    write_json,
)
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.wire.messages.cluster_views import SharingView, UsageView
from plexrl.wire.messages.run_views import QuotedJobView

HOUR_S = 3600.0


class By(StrEnum):
    TENANT = "tenant"
    JOB = "job"
    KIND = "kind"
    USER = "user"


KEYS = {
    By.TENANT: ("tenant",),
    By.JOB: ("tenant", "job", "name"),
    By.KIND: ("kind",),
    By.USER: ("tenant", "user"),
}
"""Key columns of each kind of sum."""


@dataclass(slots=True)
class UsageSum:
    """The use of all jobs with one key."""

    key: tuple[str, ...]
    operations: int = 0
    failed: int = 0
    tokens: int = 0
    gpu_seconds: float = 0.0
    paced_gpu_hours: float = 0.0
    isolated_gpu_hours: float = 0.0
    """What the jobs would have held alone; of whole jobs, as are the next fields: a sum by kind of
    operation has none."""
    held_gpu_hours: float = 0.0
    saved_gpu_hours: float = 0.0

    @property
    def gpu_hours(self) -> float:
        """GPU time, in hours."""
        return self.gpu_seconds / HOUR_S

    def record(self, by: By) -> dict[str, str | float]:
        """The columns of the sum by their names, as CSV and JSON have them."""
        shared = {} if by is By.KIND else {name: getattr(self, name) for name in SHARED}
        return {
            **dict(zip(KEYS[by], self.key, strict=True)),
            "gpu_hours": self.gpu_hours,
            **{name: getattr(self, name) for name in COUNTS},
            **shared,
            "paced_gpu_hours": self.paced_gpu_hours,
        }


COUNTS = ("operations", "failed", "tokens", "gpu_seconds")
SHARED = ("isolated_gpu_hours", "held_gpu_hours", "saved_gpu_hours")


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
        quoted = cluster.quoted() if by is By.JOB else []
    records = [row.record(by) for row in rows]
    if as_csv:
        columns = tuple(UsageSum(("",) * len(KEYS[by])).record(by))
        write_csv(columns, [[*record.values()] for record in records])
        return
    if output.as_json:
        write_json(records)
        return
    _print(rows, by)
    if quoted:
        print_quoted(quoted)


def print_quoted(quoted: Sequence[QuotedJobView]) -> None:
    """Print what jobs were quoted beside what came of them; times from their submission."""
    cells: Cells = {
        "job": "job",
        "state": "state",
        "start quoted": lambda each: seconds(each["quoted_start_s"]),
        "actual": lambda each: seconds(each["start_s"]),
        "end quoted": lambda each: seconds(each["quoted_end_s"]),
        "80 % interval": lambda each: (
            f"{seconds(each['quoted_end_low_s'])} to {seconds(each['quoted_end_high_s'])}"
        ),
        "actual end": lambda each: seconds(each["end_s"]),
        "GPU-hours quoted": lambda each: f"{each['quoted_gpu_hours']:.4f}",
        "billed": lambda each: f"{each['gpu_hours']:.4f}",
    }
    print_records("Quotes and bills", cells, quoted)


def _print(rows: Sequence[UsageSum], by: By) -> None:
    total = _total(rows, by)
    is_shared = by is not By.KIND
    keys = tuple(key for key in KEYS[by] if key != "name")
    cells = [
        (
            *row.key[: len(keys)],
            *(f"{hours:.4f}" for hours in (row.gpu_hours, row.saved_gpu_hours)[: 1 + is_shared]),
            *(row.operations, row.failed, row.tokens),
        )
        for row in [*rows, total]
    ]
    hours = ("GPU-hours", "saved")[: 1 + is_shared]
    print_table("", (*keys, *hours, *COUNTS[:3]), cells)
    if total.paced_gpu_hours:
        print_line(
            f"{total.paced_gpu_hours:.4f} of the GPU-hours are of paced jobs, whose GPUs computed "
            "nothing."
        )
    if is_shared:
        print_line(
            f"Sharing saved {total.saved_gpu_hours:.4f} GPU-hours: on groups of their own the jobs "
            f"would have held {total.isolated_gpu_hours:.4f}, and they held "
            f"{total.held_gpu_hours:.4f}."
        )


def with_sharing(rows: list[UsageSum], sharing: Sequence[SharingView], by: By) -> list[UsageSum]:
    """`rows` with the GPU-hours that their jobs would have held alone, held and saved. A job that
    held GPUs without running anything gets a row."""
    by_key = {row.key: row for row in rows}
    for view in sharing:
        row = by_key.setdefault(_key(view, by), UsageSum(_key(view, by)))
        row.isolated_gpu_hours += view["isolated_gpu_seconds"] / HOUR_S
        row.held_gpu_hours += view["held_gpu_seconds"] / HOUR_S
        row.saved_gpu_hours += view["saved_gpu_seconds"] / HOUR_S
    return list(by_key.values())


def add_up(usage: Sequence[UsageView], by: By) -> list[UsageSum]:
    """Sums of the scheduler's rows by key, in the order of first appearance."""
    by_key: dict[tuple[str, ...], UsageSum] = {}
    for view in usage:
        row = by_key.setdefault(_key(view, by), UsageSum(_key(view, by)))
        row.operations += view["operations"]
        row.failed += view["failed"]
        row.tokens += view["tokens"]
        row.gpu_seconds += view["gpu_seconds"]
        row.paced_gpu_hours += view["gpu_seconds"] / HOUR_S if view["paced"] else 0.0
    return list(by_key.values())


def _key(view: UsageView | SharingView, by: By) -> tuple[str, ...]:
    return tuple(str(view.get(name, "")) for name in KEYS[by])


def _total(rows: Sequence[UsageSum], by: By) -> UsageSum:
    _, *rest = KEYS[by]
    total = UsageSum(("all", *("" for _ in rest)))
    for row in rows:
        for name in (*COUNTS, *SHARED, "paced_gpu_hours"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
    return total
