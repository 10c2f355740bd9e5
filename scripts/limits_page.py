"""Writes the tables of docs/limits.md from `plexrl.limits.LIMITS`.

python -m scripts.limits_page          (write the page)
"""

from collections.abc import Iterator
from pathlib import Path

from plexrl.bounds import Bounds
from plexrl.limits import LIMITS

PAGE = Path(__file__).parent.parent / "docs" / "limits.md"
HEAD = "| of | option | type | at least | at most | also |\n|---|---|---|---|---|---|"


def tables() -> dict[str, str]:
    """The text of each generated part, by the name in its markers."""
    commands = [group for group in LIMITS if group.startswith("plexrl ")]
    others = [group for group in LIMITS if group not in commands]
    return {
        "calls": "\n".join([HEAD, *_rows(others)]),
        "commands": "\n".join([HEAD, *_rows(commands)]),
    }


def _rows(groups: list[str]) -> Iterator[str]:
    for group in groups:
        for name, bounds in LIMITS[group].items():
            yield f"| `{group}` | `{name}` | {_cells(bounds)} |"


def _cells(bounds: Bounds) -> str:
    also = [
        *(("0",) if bounds.may_be_zero else ()),
        *(("none",) if bounds.may_be_absent else ()),
    ]
    kind = "whole number" if bounds.is_whole else "number"
    most = f"below {bounds.most_text}" if bounds.is_open else bounds.most_text
    return f"{kind} | {bounds.least_text} | {most} | {', '.join(also)}"


def filled_in(page: str) -> str:
    """The page with its tables updated.

    Raises:
        ValueError: a table has no markers in the page.
    """
    for name, text in tables().items():
        page = replace_part(page, name, text)
    return page


def replace_part(page: str, name: str, text: str) -> str:
    """A page with a new text between the markers of a generated part.

    Raises:
        ValueError: the part has no markers in the page.
    """
    begin, end = f"<!-- {name}: generated -->\n\n", f"\n\n<!-- {name}: end -->"
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page has no part {name}: write its two markers into it")
    return "".join((head, begin, text, end, tail))


def main() -> None:
    """Write the page again."""
    PAGE.write_text(filled_in(PAGE.read_text()))


if __name__ == "__main__":
    main()
