"""`plexrl history`: what the archive has by day, its events, and the deletion of a tenant's."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.cli.cluster.observe.history import days_of
from plexrl.scheduler.service.journal.history.pieces import EVENTS, RUNS, STATE, parse
from tests.scheduler.service.journal.history.archived_cluster import ArchivedCluster


def run(*arguments: str, answer: str = "") -> str:
    result = CliRunner().invoke(app, ["history", *arguments], input=answer)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_days_have_their_events_operations_and_bytes() -> None:
    names = [
        f"{EVENTS}-000-{1:015d}-{40:015d}-{0:013d}-{1000:013d}",
        f"{RUNS}-000-{1:015d}-{9:015d}-{0:013d}-{1000:013d}",
        f"{STATE}-000-{40:015d}-{40:015d}-{1000:013d}-{1000:013d}",
        f"{EVENTS}-000-{41:015d}-{42:015d}-{1000:013d}-{86_400_000:013d}",
    ]
    pieces = [piece for name in names if (piece := parse(name, 100)) is not None]
    first, second = days_of(pieces)
    assert first == {
        "day": "1970-01-01",
        "events": 40,
        "operations": 9,
        "snapshots": 1,
        "bytes": 300,
    }
    assert (second["day"], second["events"], second["bytes"]) == ("1970-01-02", 2, 100)


def test_an_archive_is_listed_printed_and_a_tenants_part_deleted(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.work(2)
    cluster.save()
    where = ("--archive", str(tmp_path / "history"))
    (day,) = json.loads(run("list", *where, "--json"))
    assert day["events"] == len(cluster.journal)
    assert "together" in run("list", *where)
    lines = run("events", *where, "--since-hours", "1000000").splitlines()
    assert [json.loads(line)["position"] for line in lines] == list(range(1, day["events"] + 1))
    assert json.loads(lines[0])["event"]["type"] == type(cluster.journal[0][0]).__name__
    (deleted,) = [json.loads(run("delete", "u", *where, "--yes", "--json"))]
    assert deleted["events"] > 0
    rest = run("events", *where, "--since-hours", "1000000").splitlines()
    assert len(rest) < len(lines)
    assert not any('"b/actor"' in line for line in rest)


def test_a_deletion_asks_first(tmp_path: Path) -> None:
    cluster = ArchivedCluster(tmp_path)
    cluster.save()
    where = ("--archive", str(tmp_path / "history"))
    refused = CliRunner().invoke(app, ["history", "delete", "u", *where], input="n\n")
    assert refused.exit_code != 0
    assert "u" in refused.output
    assert len(cluster.archive.pieces(EVENTS)) == 1
    run("delete", "u", *where, answer="y\n")


@pytest.mark.parametrize("location", ["relative/folder", "s3://user:secret@bucket/x"])
def test_a_wrong_location_is_refused(location: str) -> None:
    result = CliRunner().invoke(app, ["history", "list", "--archive", location])
    assert result.exit_code != 0
    assert "secret" not in result.output
