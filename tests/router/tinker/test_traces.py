"""Exports of sessions' traces. The cluster's HTTP API is a function; the files are real."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plexrl.errors import PlexRLError, UnavailableError, UnknownJobError
from plexrl.router.tinker.messages.perfetto import Timeline
from plexrl.router.tinker.records import RecordFile, SessionRecord
from plexrl.router.tinker.routes.client import Client
from plexrl.router.tinker.routes.traces import KEPT_MAX, SUFFIX, _write, export
from plexrl.router.tinker.sessions import Sessions

EMPTY = Timeline(session="s", began_at=0.0, ended_at=1.0, rows=[], unfinished={})


class Cluster:
    """Answers each question for operations with an error, or with none."""

    def __init__(self) -> None:
        self.error: PlexRLError | None = None
        self.asking, self.asking_most = 0, 0

    async def call(self, *_: Any) -> Any:
        self.asking += 1
        self.asking_most = max(self.asking, self.asking_most)
        await asyncio.sleep(0)
        self.asking -= 1
        if self.error is not None:
            raise self.error
        return {"operations": []}


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordFile]:
    made = RecordFile(tmp_path / "tinker.sqlite")
    for name in ("s", "other"):
        made.put(SessionRecord(id=name, session=name, tenant="t"))
    yield made
    made.close()


def client_of(records: RecordFile, cluster: Cluster) -> Client:
    url = SimpleNamespace(scheme="http", netloc="router")
    request = SimpleNamespace(url=url, headers={"authorization": "Bearer k"})
    sessions = Sessions(cast("Any", None), cast("Any", cluster), records)
    caller = SimpleNamespace(scope="t")
    return Client(request=cast("Any", request), caller=cast("Any", caller), sessions=sessions)


def test_exports_of_a_tenant_are_made_one_by_one(
    records: RecordFile,
) -> None:
    cluster = Cluster()
    client = client_of(records, cluster)

    async def main() -> None:
        await asyncio.gather(*(export(client, name) for name in ("s", "other", "s")))

    asyncio.run(main())
    assert cluster.asking_most == 1


def test_a_scheduler_that_does_not_answer_is_an_error_and_one_that_forgot_is_an_empty_trace(
    records: RecordFile,
) -> None:
    cluster = Cluster()
    client = client_of(records, cluster)
    cluster.error = UnavailableError("the scheduler starts")
    with pytest.raises(UnavailableError):
        asyncio.run(export(client, "s"))
    cluster.error = UnknownJobError("long ago")
    assert asyncio.run(export(client, "s"))["status"] == "ready"


def test_an_export_more_than_are_kept_deletes_the_tenants_oldest_one(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    _write(folder, f"other-0{SUFFIX}", EMPTY)
    first = (folder / f"other-0{SUFFIX}").stat().st_mtime
    for number in range(KEPT_MAX + 3):
        name = f"own-{number}{SUFFIX}"
        _write(folder, name, EMPTY)
        os.utime(folder / name, (first + number, first + number))
    kept = {file.name for file in folder.iterdir()}
    newest = {f"own-{number}{SUFFIX}" for number in range(3, KEPT_MAX + 3)}
    assert kept == newest | {f"other-0{SUFFIX}"}
