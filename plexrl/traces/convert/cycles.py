"""Splits the operation log of a deployment into training cycles. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""A row of `/v1/jobs` or `/v1/operations`."""

CYCLE_ENDS = ("publish", "optim_step", "forward")
"""Kinds of operation that end a cycle; the first kind that occurs in the log applies."""


def split_cycles(rows: Sequence[Row]) -> tuple[list[list[Row]], list[Row]]:
    """The whole cycles, oldest first, and the rows after the last of them; `rows` in run order."""
    kinds = {row["kind"] for row in rows}
    last = next((kind for kind in CYCLE_ENDS if kind in kinds), None)
    cycles: list[list[Row]] = []
    rest: list[Row] = []
    for row in rows:
        rest.append(row)
        if row["kind"] == last:
            cycles.append(rest)
            rest = []
    return cycles, rest
