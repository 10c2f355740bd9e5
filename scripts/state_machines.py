"""Writes the diagrams of docs/state_machines.md from the scheduler's tables.

python -m scripts.state_machines          (write the page)
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from plexrl.scheduler.state.machines import (
    job_states,
    lock_states,
    operation_states,
    residency_states,
    wpg_states,
)

PAGE = Path(__file__).parent.parent / "docs" / "state_machines.md"

Row = tuple[StrEnum, StrEnum, StrEnum]
"""State, trigger, next state."""

S = TypeVar("S", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


def rows(table: Mapping[tuple[S, T], S]) -> list[Row]:
    """The table's rows, in its order."""
    return [(before, trigger, after) for (before, trigger), after in table.items()]


TABLES: dict[str, list[Row]] = {
    "job": rows(job_states.TRANSITIONS),
    "wpg": rows(wpg_states.TRANSITIONS),
    "residency": rows(residency_states.TRANSITIONS),
    "lock": rows(lock_states.TRANSITIONS),
    "operation": rows(operation_states.TRANSITIONS),
}
"""By the name that the page's markers have."""


def diagram(table: list[Row]) -> str:
    """The table as a Mermaid state diagram, without the triggers that change nothing."""
    edges: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for before, trigger, after in table:
        if before != after:
            edges.setdefault((before, after), []).append(trigger.value)
    states = list(type(table[0][0]))
    left = {before for before, _ in edges}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {states[0].value}"]
    lines += [
        f"    {before.value} --> {after.value}: {', '.join(triggers)}"
        for (before, after), triggers in edges.items()
    ]
    lines += [f"    {state.value} --> [*]" for state in states if state not in left]
    return "\n".join([*lines, "```"])


def with_diagrams(page: str) -> str:
    """`page` with a diagram between each pair of markers."""
    for name, table in TABLES.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = marked.subn(rf"\g<1>{diagram(table)}\n\g<2>", page)
        if count != 1:
            raise ValueError(f"{PAGE}: {count} places are marked <!-- {name} -->; mark one")
    return page


def main() -> None:
    """Write the page again."""
    PAGE.write_text(with_diagrams(PAGE.read_text()))


if __name__ == "__main__":
    main()
