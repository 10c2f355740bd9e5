"""The ranks of one engine all continue after a sync in flight, or none does.

Ranks are threads here, and what they pull from is replaced: no source fails for one rank alone when
it is asked to.
"""

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from plexrl.errors import StateLostError, UnavailableError
from plexrl.statemanager.transfer.pull import PullMode
from plexrl.wire.operations import OperationKind, SyncWeightsParams
from plexrl.worker.interface.backend import (
    BackendCall,
    BackendResult,
    Emit,
    EmitRow,
    RolloutBackend,
)
from plexrl.worker.rollout.rollout_engine import EngineStats
from plexrl.worker.state.state_mover import StateMover
from plexrl.worker.state.weight_sync import SplitVersionError
from tests.wire.runs import make_run

if TYPE_CHECKING:
    from plexrl.statemanager.client.client import StateManagerClient

COMMAND = make_run(
    OperationKind.SYNC_WEIGHTS,
    params=SyncWeightsParams(source="a", in_flight=True),
    sources=("s",),
    source_seq=3,
    seq=5,
    trainer_step=2,
)
PULLED = SimpleNamespace(
    bytes_by_source={},
    bytes_moved=1,
    bytes_replicated=0,
    bytes_wanted=1,
    fraction=1.0,
    mode=PullMode.FULL,
    seconds=0.1,
    transfer_s=0.0,
    tier="host",
)


@dataclass(eq=False)
class Group:
    """Values that the ranks exchange."""

    said: dict[int, str] = field(default_factory=dict)
    met: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60))


class Idle(RolloutBackend):
    """A rollout backend of which a sync uses nothing but what `Rank` defines."""

    has_work = False

    def lay_out(self) -> None:
        raise NotImplementedError

    def slices(self) -> tuple[()]:
        return ()

    def run(self, call: BackendCall) -> BackendResult:
        raise NotImplementedError

    def submit(self, call: BackendCall, emit: Emit | None, emit_row: EmitRow | None = None) -> None:
        raise NotImplementedError

    def abort(self, operation: str, rows: Collection[int] | None = None) -> None:
        raise NotImplementedError

    def load(self) -> dict[str, Any]:
        raise NotImplementedError

    def interrupt(self, operation: str) -> BackendResult | None:
        raise NotImplementedError


@dataclass(eq=False)
class Rank(Idle):
    """A rank's engine, and its client of the StateManager; `fault` is what its pull meets."""

    rank: int
    group: Group
    fault: Exception | None
    is_torn: bool = False
    paused: bool = False
    is_new: bool = False

    def step(self) -> list[Any]:
        raise AssertionError("no step runs during a sync")

    def stats(self) -> EngineStats:
        return cast("EngineStats", self)

    def pause(self, *, recompute_kv: bool = True) -> None:
        assert recompute_kv
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def pull(self, **wanted: Any) -> Any:
        assert wanted["seq"] == 3
        assert self.paused
        if self.fault is not None:
            raise self.fault
        return PULLED

    def after_pull(self, *, seq: int, trainer_step: int) -> None:
        assert (seq, trainer_step) == (5, 2)
        self.is_new = True

    def gather(self, value: str) -> list[str]:
        self.group.said[self.rank] = value
        self.group.met.wait()
        return list(self.group.said.values())


def synced(*ranks: Rank) -> list[Any]:
    """Result or error of the sync on each rank, and whether its weights mix two versions."""

    def one(rank: Rank) -> Any:
        mover = StateMover(rank, cast("StateManagerClient", rank), "g")
        mover.is_resident = True
        try:
            found: Any = mover.move(COMMAND)["weights_seq"]
        except Exception as error:
            found = error
        return found, mover.is_torn

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def pair(first: Exception | None, second: Exception | None, **fields: Any) -> tuple[Rank, Rank]:
    group = Group()
    return Rank(0, group, first), Rank(1, group, second, **fields)


@pytest.mark.parametrize("was_paused", [False, True])
def test_ranks_that_have_all_pulled_are_as_they_were(was_paused: bool) -> None:
    ranks = pair(None, None)
    for rank in ranks:
        rank.paused = was_paused
    assert synced(*ranks) == [(3, False), (3, False)]
    assert [rank.paused for rank in ranks] == [was_paused, was_paused]


def test_ranks_that_are_all_refused_continue_with_the_previous_weights() -> None:
    fault = StateLostError("the version is gone")
    ranks = pair(fault, fault)
    assert synced(*ranks) == [(fault, False), (fault, False)]
    assert not any(rank.paused or rank.is_new for rank in ranks)


@pytest.mark.parametrize("is_torn", [False, True])
def test_no_token_is_drawn_while_ranks_have_weights_of_two_versions(is_torn: bool) -> None:
    fault = UnavailableError("its sources are gone", retry_after_s=1.0)
    ranks = pair(None, fault, is_torn=is_torn)
    found = synced(*ranks)
    assert [type(error) for error, _ in found] == [SplitVersionError] * 2
    assert "its sources are gone" in str(found[1][0])
    assert all(is_lost for _, is_lost in found), "so the workers restart"
    assert all(rank.paused for rank in ranks)
