"""Unreferenced payloads are deleted; referenced and new ones stay."""

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plexrl.errors import UnavailableError
from plexrl.ids import BlobRef
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.router.blobs.garbage_collection import collect_orphans
from plexrl.wire.messages.cluster_views import NeedlessPayloadsView

LIMIT_S = 60.0


class Knowing:
    """A scheduler that references some payloads and is unreachable at first."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.queries: asyncio.Queue[list[str]] = asyncio.Queue()
        self.is_away = True

    async def call(self, method: str, params: Mapping[str, Any]) -> NeedlessPayloadsView:
        assert method == "needless_payloads"
        self.queries.put_nowait(list(params["blobs"]))
        if self.is_away:
            self.is_away = False
            raise UnavailableError("the scheduler is restarting")
        return {"blobs": [blob for blob in params["blobs"] if blob not in self.known]}


def test_old_unreferenced_payloads_are_deleted_after_the_schedulers_reply(tmp_path: Path) -> None:
    store = DirectoryBlobStore(tmp_path)
    names = ("j:1/a.0.in", "j:2.0.in", "new.0.in", "result.out", f"{'a:' * 99}.0.in")
    long_ago = time.time() - 7200

    async def run() -> None:
        for name in names:
            await store.write(BlobRef(name), b"x")
        age(tmp_path, long_ago)
        scheduler = Knowing({"j:1/a.0.in"})
        sweeping = asyncio.create_task(
            collect_orphans(store, scheduler, older_than_s=3600.0, every_s=0.01)
        )
        async with asyncio.timeout(LIMIT_S):
            queries = [await scheduler.queries.get() for _ in range(3)]
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        assert queries == [["j:1/a.0.in", "j:2.0.in"]] * 2 + [["j:1/a.0.in"]]

    asyncio.run(run())
    assert len(list(tmp_path.iterdir())) == len(names) - 1
    assert not (tmp_path / "j%3A2.0.in").exists()


def age(folder: Path, at: float) -> None:
    for path in folder.iterdir():
        if path.name != "new.0.in":
            os.utime(path, (at, at))
