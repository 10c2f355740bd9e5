"""`docs/events.md` names every field of every object, and nothing else."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from plexrl.events import records
from plexrl.events.config import BrokerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
COMMON = set(records.Record.__struct_fields__)


def documented(after: str) -> set[str]:
    """The names in the first column of the first table after a text."""
    table = PAGE[PAGE.index(after) :].partition("\n|")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize(
    ("after", "kind", "elsewhere"),
    [
        ("**`scheduler`**", records.SchedulerRecord, COMMON),
        ("**`jobs/TENANT/JOB`**", records.JobRecord, COMMON),
        ("Each of `deployments`", records.DeploymentRecord, set()),
        ("**`nodes/NODE`**", records.NodeRecord, COMMON),
        ("**`groups/GROUP`**", records.GroupRecord, COMMON),
        ("**`prefetch/NODE`**", records.PrefetchHint, {"schema"}),
    ],
)
def test_the_page_has_every_field(after: str, kind: type, elsewhere: set[str]) -> None:
    own: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]  # a msgspec struct
    assert documented(after) == set(own) - elsewhere


def test_the_page_has_the_common_fields_and_every_setting() -> None:
    assert documented("States have these fields") == COMMON - {"schema"}
    secret = {"password"}
    settings = {each.name for each in fields(BrokerConfig)} - secret
    assert documented("apart.\n") == settings
