"""Writes the table of docs/access.md: what each role may do by each route.

python -m scripts.access_page          (write the page)
"""

from pathlib import Path

from plexrl.access import AccessRole
from plexrl.router.services.access_table import ROWS, Reach, Rule
from scripts.limits_page import replace_part

PAGE = Path(__file__).parent.parent / "docs" / "access.md"
CELLS = {Reach.NONE: "", Reach.OWN: "own", Reach.ALL: "all"}


def table() -> str:
    """The table, as Markdown."""
    head = f"| route | {' | '.join(AccessRole)} | no key |"
    rows = [f"| `{route}` | {_cells(rule)} |" for route, rule in ROWS.items()]
    return "\n".join([head, "|---|" + "---|" * (len(AccessRole) + 1), *rows])


def _cells(rule: Rule) -> str:
    reached = [CELLS[rule.of(role)] for role in AccessRole]
    return " | ".join([*reached, "" if rule.needs_key else "all"])


def filled_in(page: str) -> str:
    """The page with its table updated. Raises `ValueError`: the table has no markers."""
    return replace_part(page, "routes", table())


def main() -> None:
    """Write the page again."""
    PAGE.write_text(filled_in(PAGE.read_text()))


if __name__ == "__main__":
    main()
