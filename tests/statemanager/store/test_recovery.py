"""Recovery after a crash in the middle of a move."""

from pathlib import Path

import pytest

from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from tests.statemanager.store.test_replicas import OpenStore, Rank, open_store

__all__ = ["open_store"]


def directory_of(store: Store, tier: TierName) -> Path:
    return store._tiers[tier].directory


@pytest.mark.parametrize("tier", list(TierName))
def test_a_crash_while_a_version_is_replaced_leaves_its_replicas_whole(
    open_store: OpenStore, tier: TierName
) -> None:
    """The headers of the old and new version exist, and another rank shares the old objects."""
    store = open_store(**({"host_bytes": 4096} if tier == TierName.NVME else {}))
    first, other = Rank(store, 0, 2), Rank(store, 1, 2)
    first.fill(1, 2)
    other.fill(1, 3)
    first.put(5)
    other.put(5)
    directory = directory_of(store, tier)
    (old,) = directory.glob("*.0.state.5.*.version")
    kept = old.read_bytes()
    files = {path: path.read_bytes() for path in directory.glob("*.object")}
    first.fill(4, 5)
    first.put(5)
    old.write_bytes(kept)
    for path, contents in files.items():
        path.write_bytes(contents)
    store = first.store = other.store = open_store()
    store.check()
    first.check(5)
    other.check(5)
    # New objects must not overwrite the replica.
    fresh = Rank(store, 0, 2)
    fresh.fill(6, 7)
    fresh.put(6)
    other.check(5)
    fresh.check(6)
