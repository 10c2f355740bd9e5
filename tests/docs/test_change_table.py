"""The table of rules in CONTRIBUTING.md: one file and one test for each rule, and both exist."""

import re
from itertools import takewhile

from tests.docs.pages import ROOT

ROW = re.compile(r"^\| ([^|`]+) \| `([^`|]+)` \| `([^`|]+)` \|$", re.MULTILINE)
ROWS_MIN = 24


def table() -> list[str]:
    """The lines of the table, without its head."""
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    first = lines.index("| I want to change … | open … | guarded by … |") + 2
    return list(takewhile(bool, lines[first:]))


def missing(path: str) -> str:
    """Says that a path does not exist, and where files of this name are."""
    top, _, name = path.partition("/")
    name = name.rpartition("/")[2]
    others = ", ".join(str(each.relative_to(ROOT)) for each in (ROOT / top).rglob(name))
    return f"{path} does not exist; files of this name: {others or 'none'}"


def test_every_row_has_one_file_and_one_test_that_exist() -> None:
    wrong = []
    for line in table():
        found = ROW.match(line)
        if found is None:
            wrong.append(f"not a rule, a file and a test: {line}")
            continue
        _, file, test = found.groups()
        wrong += [missing(path) for path in (file, test) if not (ROOT / path).exists()]
        if not test.rpartition("/")[2].startswith("test_"):
            wrong.append(f"{test} is not a test")
    assert not wrong, "\n".join(wrong)


def test_the_table_covers_the_rules_that_change_most() -> None:
    assert len(table()) >= ROWS_MIN
