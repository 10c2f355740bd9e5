"""What the router forgets of clients."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.records import (
    FutureRecord,
    ModelRecord,
    RecordFile,
    SessionRecord,
    WeightsRecord,
)
from plexrl.router.tinker.sessions import GONE_S, Sessions


def sweep(records: RecordFile, now: float) -> None:
    """A round of a router that has started at time 0 and heard of no client."""

    async def main() -> None:
        api = ClusterApi(cast("Any", None))
        # Without saved weights, the sweep asks nothing of the router's services.
        await Sessions(cast("Any", None), api, records).sweep(0.0, now, time.time())
        await api.close()

    asyncio.run(main())


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_client_that_is_gone_leaves_its_saved_weights_only(
    tmp_path: Path, has_weights: bool
) -> None:
    records = RecordFile(tmp_path / "tinker.sqlite")
    records.put(SessionRecord(id="s", session="s", tenant="t"))
    records.put(
        ModelRecord(id="m", session="s", deployment="s/d", base_model="b", folder="f", lora=None)
    )
    records.put(FutureRecord(id="m:1", session="s", kind="optim_step"))
    if has_weights:
        records.put(WeightsRecord(id="w", session="s", model="m", checkpoint="c"))
    sweep(records, GONE_S - 1)
    assert records.all(FutureRecord)
    sweep(records, GONE_S + 1)
    assert not records.all(FutureRecord)
    assert len(records.all(SessionRecord)) == len(records.all(ModelRecord)) == has_weights
    records.close()
