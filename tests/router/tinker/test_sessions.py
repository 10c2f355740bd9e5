"""What the router forgets of clients."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.records import (
    FutureRecord,
    HeardRecord,
    ModelRecord,
    RecordFile,
    SessionRecord,
    WaitingRecord,
    WeightsRecord,
)
from plexrl.router.tinker.sessions import FINISHED_KEPT_S, GONE_S, SWEEP_S, Sessions


def make_router(records: RecordFile) -> Sessions:
    """The sessions of a router; without saved weights, a sweep asks nothing of its services."""
    return Sessions(cast("Any", None), ClusterApi(cast("Any", None)), records)


def sweep(router: Sessions, now: float, later_s: float = 0.0) -> None:
    """A round `later_s` seconds after now by the clock of records."""
    asyncio.run(router.sweep(now, time.time() + later_s))


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
    router = make_router(records)
    for now in (0.0, GONE_S - 1):
        sweep(router, now)
    assert records.all(FutureRecord)
    sweep(router, GONE_S + 1)
    assert not records.all(FutureRecord)
    assert records.all(SessionRecord), "it is listed for a day"
    sweep(router, GONE_S + 1, FINISHED_KEPT_S + 1)
    assert len(records.all(SessionRecord)) == len(records.all(ModelRecord)) == has_weights
    records.close()


def test_what_arrives_while_a_session_ends_or_is_left_by_a_killed_router_is_forgotten(
    tmp_path: Path,
) -> None:
    records = RecordFile(tmp_path / "tinker.sqlite")
    now = time.time()
    records.put(SessionRecord(id="s", session="s", tenant="t", is_finished=True, finished_at=now))
    records.put(
        ModelRecord(id="m", session="s", deployment="s/d", base_model="b", folder="f", lora=None)
    )
    left = (
        FutureRecord(id="m:2", session="s", kind="optim_step"),
        HeardRecord(id="s", session="s"),
        WaitingRecord(id="m:2", session="s", model="m", tenant="t", kind="k", nbytes=1),
    )
    for record in left:
        records.put(record)
    router = make_router(records)
    sweep(router, 0.0)
    assert records.all(FutureRecord), "the router that ends it may be at it"
    sweep(router, 0.0, SWEEP_S + 1)
    assert not any(records.all(type(record)) for record in left)
    assert records.all(SessionRecord)
    assert records.all(ModelRecord)
    records.close()


def test_a_client_that_another_router_hears_is_not_gone(tmp_path: Path) -> None:
    records = RecordFile(tmp_path / "tinker.sqlite")
    records.put(SessionRecord(id="s", session="s", tenant="t"))
    router = make_router(records)
    for now in (0.0, GONE_S - 1):
        sweep(router, now)
    # A clock that was set back does not make the sign of life an old one.
    records.put(HeardRecord(id="s", session="s", made_at=1.0))
    for now in (GONE_S + 1, 2 * GONE_S):
        sweep(router, now)
    assert not records.all(SessionRecord)[0].is_finished
    sweep(router, 2 * GONE_S + 2)
    assert records.all(SessionRecord)[0].is_finished
    records.close()
