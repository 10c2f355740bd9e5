"""Replicas are stored once; also quotas, draining and predicted uses."""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from plexrl.errors import OperationCancelledError, QuotaExceededError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.config import StateManagerConfig, TenantLimit
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.layout import lay_out
from plexrl.statemanager.layout.versions import Manifest, Section, VersionKind
from plexrl.statemanager.store.background.drain import Drainer
from plexrl.statemanager.store.background.prefetch import HINTS_MAX, Prefetcher
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from tests.statemanager.conftest import MIB, run_together, wait_until
from tests.statemanager.host_memory import HostMemory

HOST, NVME = TierName.HOST, TierName.NVME
OpenStore = Callable[..., Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens stores on the same directories, and closes them."""
    host_dir = tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm")
    opened: list[Store] = []

    def open_again(**fields: Any) -> Store:
        for former in opened:
            former.close()
        opened.clear()
        clock = fields.pop("clock", lambda: 0.0)
        config = {"host_bytes": 64 * MIB, "nvme_bytes": 64 * MIB, **fields}
        store = Store(
            StateManagerConfig(
                node="n", listen="", host_dir=host_dir, nvme_dir=str(tmp_path / "nvme"), **config
            ),
            clock=clock,
        )
        opened.append(store)
        return store

    yield open_again
    for store in opened:
        store.close()
    shutil.rmtree(host_dir)


class Rank:
    """A rank whose deployment replicates `w`; each rank has its own `o`."""

    def __init__(self, store: Store, rank: int, world_size: int, nbytes: int = 5 * MIB) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.arena = Arena(2 * nbytes)
        self.memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        self.halves = self.memory[:nbytes], self.memory[nbytes : 2 * nbytes]
        self.nbytes = nbytes

    def slices(self, rank: int) -> tuple[StateSlice, ...]:
        return tuple(
            StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name=name),
                dtype="U8",
                global_shape=(self.nbytes * (self.world_size if name == "o" else 1),),
                offset=(rank * self.nbytes if name == "o" else 0,),
                shape=(self.nbytes,),
                arena_offset=index * self.nbytes,
            )
            for index, name in enumerate(("w", "o"))
        )

    def fill(self, shared: int, own: int) -> None:
        for half, seed in zip(self.halves, (shared, own), strict=True):
            half[:] = np.random.default_rng(seed).integers(0, 256, self.nbytes, dtype=np.uint8)

    def manifest(self, seq: int, **fields: Any) -> Manifest:
        others = {r: self.slices(r) for r in range(self.world_size) if r != self.rank}
        layout = lay_out(self.slices(self.rank), self.rank, others)
        whole = Manifest(
            deployment="job/actor",
            rank=self.rank,
            world_size=self.world_size,
            seq=seq,
            kind=VersionKind.STATE,
            parts=(),
            meta_json="{}",
            slices=self.slices(self.rank),
            extents=layout.extents,
            nbytes=layout.nbytes,
            sections=layout.sections,
        )
        return replace(whole, **fields)

    def put(self, seq: int, **fields: Any) -> None:
        self.store.put(self.manifest(seq, **fields), HostMemory(self.arena))

    def check(self, seq: int) -> None:
        expected = self.memory.copy()
        self.memory[:] = 0
        name = self.manifest(seq).name
        self.store.load(name, name, HostMemory(self.arena))
        assert np.array_equal(self.memory, expected)


def once(happens: dict[str, Callable[[], None]]) -> Callable[[str], None]:
    """Fault points that call `happens` on their first visit."""

    def reach(at: str) -> None:
        happens.pop(at, lambda: None)()

    return reach


def ranks_of(store: Store, count: int, **fields: int) -> list[Rank]:
    made = [Rank(store, rank, count, **fields) for rank in range(count)]
    for rank in made:
        rank.fill(1, 100 + rank.rank)
    return made


@pytest.mark.parametrize("count", [2, 4, 8])
def test_replicas_are_stored_once(open_store: OpenStore, count: int) -> None:
    store = open_store()
    ranks = ranks_of(store, count)
    run_together(*(lambda rank=rank: rank.put(1) for rank in ranks))
    data = (count + 1) * 5 * MIB
    assert data < store.used_bytes(HOST) < data + MIB
    for rank in ranks:
        rank.check(1)
    store.check()


def test_a_replica_that_differs_in_one_byte_is_stored_separately(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    first, second = ranks_of(store, 2)
    second.halves[0][4 * MIB + 123] ^= 1
    first.put(1)
    second.put(1)
    assert "differs from its declared replica" in caplog.text
    assert store.used_bytes(HOST) > 20 * MIB
    first.check(1)
    second.check(1)


def test_a_manifest_that_names_one_replica_twice_does_not_wait_for_itself(
    open_store: OpenStore,
) -> None:
    store = open_store()
    [rank] = ranks_of(store, 1)
    manifest = rank.manifest(1)
    halves = tuple(Section(start=start, nbytes=5 * MIB, share_key="same") for start in (0, 5 * MIB))
    store.put(replace(manifest, sections=halves), HostMemory(rank.arena))
    rank.check(1)
    store.check()


def test_shared_bytes_are_freed_with_the_last_version(open_store: OpenStore) -> None:
    store = open_store()
    first, second = ranks_of(store, 2)
    first.put(1)
    second.put(1)
    store.drop([first.manifest(1).name])
    second.check(1)
    assert 10 * MIB < store.used_bytes(HOST) < 11 * MIB
    store.drop([second.manifest(1).name])
    assert store.used_bytes(HOST) == 0
    store.check()


def test_sharing_survives_a_restart_and_a_spill(open_store: OpenStore) -> None:
    store = open_store()
    ranks = ranks_of(store, 2)
    for rank in ranks:
        rank.put(1)
    for spill in (False, True):
        store = open_store()
        for rank in ranks:
            rank.store = store
        assert 15 * MIB < store.used_bytes(NVME if spill else HOST) < 16 * MIB
        for rank in ranks:
            rank.check(1)
        store.check()
        assert store.persist() == []
        assert store.used_bytes(HOST) == 0


@pytest.mark.parametrize("tier", [HOST, NVME])
def test_recovery_of_a_replaced_version_keeps_the_objects_that_others_share(
    open_store: OpenStore, tier: TierName
) -> None:
    """The daemon died before it deleted the replaced version's header."""
    store = open_store()
    first, second = ranks_of(store, 2)
    first.put(1)
    second.put(1)
    if tier == NVME:
        assert store.persist() == []
    [replaced] = store._tiers[tier].directory.glob("*.0.state.1.*.version")
    header = replaced.read_bytes()
    first.put(1)
    if tier == NVME:
        assert store.persist() == []
    assert not replaced.exists()
    replaced.write_bytes(header)
    store = open_store()
    assert not replaced.exists()
    first.store = second.store = store
    store.check()
    # Free ranges are overwritten.
    other = Rank(store, 0, 1)
    other.fill(7, 8)
    other.put(1, deployment="b/actor")
    for rank in (first, second):
        rank.check(1)
    store.check()


def test_versions_that_share_objects_are_evicted_together(open_store: OpenStore) -> None:
    store = open_store(host_bytes=22 * MIB)
    ranks = ranks_of(store, 2)
    for rank in ranks:
        rank.put(1)
    other = Rank(store, 0, 1)
    other.fill(7, 8)
    other.put(1, deployment="b/actor")
    tiers = {v.manifest.name: v.tier for v in store.find(lambda _: True)}
    assert [tiers[rank.manifest(1).name] for rank in ranks] == [NVME, NVME]
    assert 15 * MIB < store.used_bytes(NVME) < 16 * MIB
    for rank in ranks:
        rank.check(1)


def test_a_copy_on_nvme_makes_eviction_free(open_store: OpenStore) -> None:
    # NVMe holds one version, so the copy must be the only write.
    store = open_store(host_bytes=11 * MIB, nvme_bytes=11 * MIB)
    [rank] = ranks_of(store, 1)
    rank.put(1)
    assert store.allocator.copy_to_nvme(rank.manifest(1).name, in_background=True)
    written = sorted(path.stat().st_mtime_ns for path in nvme_files(store))
    rank.put(2)
    assert sorted(path.stat().st_mtime_ns for path in nvme_files(store)) == written
    assert [v.tier for v in store.find(lambda _: True)] == [NVME, HOST]
    store.check()


def test_a_copy_on_nvme_is_dropped_for_a_version_without_one(open_store: OpenStore) -> None:
    store = open_store(host_bytes=22 * MIB, nvme_bytes=11 * MIB)
    [rank] = ranks_of(store, 1)
    for seq in (1, 2):
        rank.put(seq)
    # Its use is expected soon, so the other version is evicted; NVMe is full with the copy.
    store.touch(rank.manifest(1).name)
    assert store.allocator.copy_to_nvme(rank.manifest(1).name, in_background=True)
    rank.put(3)
    assert [v.tier for v in store.find(lambda _: True)] in ([HOST, NVME, HOST], [NVME, HOST, HOST])
    store.check()


def test_the_latest_expected_use_is_spilled_first(open_store: OpenStore) -> None:
    store = open_store(host_bytes=32 * MIB)
    [rank] = ranks_of(store, 1)
    for name in ("a", "b", "c"):
        rank.put(1, deployment=name)
    store.allocator.expect_use("a", 5.0)
    store.allocator.expect_use("b", 50.0)
    store.allocator.expect_use("c", 20.0)
    rank.put(1, deployment="d")
    tiers = {v.manifest.deployment: v.tier for v in store.find(lambda _: True)}
    assert tiers == {"a": HOST, "b": NVME, "c": HOST, "d": HOST}


def test_versions_without_prediction_are_spilled_in_lru_order(open_store: OpenStore) -> None:
    now = [0.0]
    store = open_store(host_bytes=32 * MIB, clock=lambda: now[0])
    [rank] = ranks_of(store, 1)
    for name in ("a", "b", "c"):
        rank.put(1, deployment=name)
        now[0] += 10
    store.touch(rank.manifest(1, deployment="a").name)
    rank.put(1, deployment="d")
    tiers = {v.manifest.deployment: v.tier for v in store.find(lambda _: True)}
    assert tiers == {"a": HOST, "b": NVME, "c": HOST, "d": HOST}


def test_a_quota_refuses_before_anything_changes(open_store: OpenStore) -> None:
    store = open_store()
    [rank] = ranks_of(store, 1)
    store.quotas.limits["t"] = TenantLimit(total_bytes=25 * MIB)
    rank.put(1, tenant="t")
    rank.put(2, tenant="t")
    before = store.find(lambda _: True)
    with pytest.raises(QuotaExceededError, match="tenant 't'") as caught:
        rank.put(3, tenant="t")
    assert caught.value.details["needed_bytes"] == 10 * MIB
    assert store.find(lambda _: True) == before
    rank.put(3, tenant="u")
    # Replaced and superseded versions do not count.
    rank.put(2, tenant="t")
    store.put(rank.manifest(4, tenant="t"), HostMemory(rank.arena), [rank.manifest(1).name])


def test_a_tenant_may_use_its_quotas_to_the_last_byte(open_store: OpenStore) -> None:
    store = open_store()
    [rank] = ranks_of(store, 1)
    rank.put(1, tenant="t")
    used = store.quotas.used_by("t")[HOST]
    for host_bytes, tier in ((used + 10 * MIB - 1, NVME), (used + 10 * MIB, HOST)):
        store.quotas.limits["t"] = TenantLimit(host_bytes=host_bytes)
        rank.put(2, tenant="t")
        name = rank.manifest(2).name
        assert {v.manifest.name: v.tier for v in store.find(lambda _: True)}[name] == tier
    store.quotas.limits["t"] = TenantLimit(total_bytes=30 * MIB - 1)
    with pytest.raises(QuotaExceededError):
        rank.put(3, tenant="t")
    store.quotas.limits["t"] = TenantLimit(total_bytes=30 * MIB)
    rank.put(3, tenant="t")
    rank.check(3)


def test_a_version_beyond_its_tenants_host_quota_goes_to_nvme(open_store: OpenStore) -> None:
    store = open_store()
    [rank] = ranks_of(store, 1)
    store.quotas.limits["t"] = TenantLimit(host_bytes=15 * MIB)
    for seq in (1, 2):
        rank.put(seq, tenant="t")
    used = store.quotas.used_by("t")
    assert 10 * MIB < used[HOST] < 11 * MIB
    assert 10 * MIB < used[NVME] < 11 * MIB
    name = rank.manifest(2).name
    assert not store.prefetch(name, name)
    assert store.quotas.used_by("nobody") == {HOST: 0, NVME: 0}


def test_recycled_memory_shows_no_old_data(open_store: OpenStore) -> None:
    """Gaps between extents and the end of the last page are zero."""
    store = open_store(host_bytes=2 * MIB)
    [rank] = ranks_of(store, 1, nbytes=512 << 10)
    rank.memory[:] = 0xAA
    rank.put(1)
    store.drop([rank.manifest(1).name])
    whole = rank.slices(0)
    small = (replace(whole[0], shape=(100,)), replace(whole[1], shape=(100,)))
    layout = lay_out(small)
    manifest = rank.manifest(
        2, slices=small, extents=layout.extents, sections=layout.sections, nbytes=layout.nbytes
    )
    rank.memory[:] = 0xBB
    store.put(manifest, HostMemory(rank.arena))
    with store.lease(manifest.name, "it") as lease:
        [region] = lease.regions
        segment = np.memmap(Path(f"/proc/self/fd/{region.fd}"), dtype=np.uint8, mode="r")
        found = segment[region.offset : region.offset + region.nbytes]
        assert found[:100].tobytes() == found[128:228].tobytes() == b"\xbb" * 100
        assert not found[100:128].any()
        assert not found[228:].any()


def test_a_release_cancels_a_background_copy(open_store: OpenStore) -> None:
    store = open_store()
    [rank] = ranks_of(store, 1, nbytes=16 * MIB)
    rank.put(1)
    outcome: list[object] = []

    def copy() -> None:
        try:
            outcome.append(store.allocator.copy_to_nvme(rank.manifest(1).name, in_background=True))
        except OperationCancelledError as error:
            outcome.append(error)

    def release() -> None:
        wait_until(lambda: bool(store.allocator._moves) or bool(outcome))
        store.release("job/actor")

    run_together(copy, release)
    # Nothing is left, regardless of the order.
    assert len(outcome) == 1
    assert store.used_bytes(HOST) == store.used_bytes(NVME) == 0
    store.check()


def test_draining_copies_versions_in_eviction_order(open_store: OpenStore) -> None:
    store = open_store(host_bytes=16 * MIB)
    [rank] = ranks_of(store, 1)
    rank.put(1)
    drainer = Drainer(store, 16 * MIB)
    wait_until(lambda: store.without_nvme_copy() == [])
    drainer.close()
    assert [v.tier for v in store.find(lambda _: True)] == [HOST]
    assert store.used_bytes(NVME) > 10 * MIB
    rank.check(1)


def nvme_files(store: Store) -> list[Path]:
    return list(store._tiers[NVME].directory.iterdir())


def test_a_replica_that_is_promoted_and_evicted_during_a_save_is_kept(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    first, other = ranks_of(store, 2)
    first.fill(1, 2)
    other.fill(1, 3)
    first.put(5)
    name = first.manifest(5).name
    store.allocator.copy_to_nvme(name, keep=False)

    def bring() -> None:
        with store.lease_in_memory(name, name) as lease:
            assert lease.tier == HOST

    def copy() -> None:
        store.allocator.copy_to_nvme(name, keep=False)

    happens: dict[str, Callable[[], None]] = {"put.reserved": bring, "put.copied": copy}
    monkeypatch.setattr(store._faults, "reach", once(happens))
    other.put(5)
    assert not happens
    other.check(5)
    first.check(5)
    other = Rank(open_store(), 1, 2)
    other.fill(1, 3)
    other.check(5)


def test_a_longer_object_name_grows_the_reservation(open_store: OpenStore) -> None:
    store = open_store(tenant_host_bytes_max=3 * MIB)
    first, tenth = Rank(store, 0, 11, MIB), Rank(store, 10, 11, MIB)
    first.fill(1, 2)
    tenth.fill(1, 3)
    first.put(5)
    tenth.put(5)
    with store._catalog.lock:
        record = store._catalog.current[tenth.manifest(5).name].record(NVME)
    store.release("job/actor")
    assert not store.used_bytes(NVME)
    # The header fills its last page; the tenth rank's own object has a longer name.
    text = len(msgspec.json.encode(record)) - len("{}") - 1
    room = -(text + 24) % 4096
    first.put(6)
    tenth.put(6, meta_json="x" * room)
    tenth.check(6)


def test_versions_being_stored_count_against_the_quota(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas count once, and not in addition to the versions that they replace."""
    store = open_store(tenant_bytes_max=5 * MIB)
    ranks = [Rank(store, rank, 2, MIB) for rank in range(2)]
    stranger = Rank(store, 0, 1, MIB)
    for seq in (1, 2):
        former = [rank.manifest(seq - 1).name for rank in ranks]
        for rank in ranks:
            rank.fill(seq, seq + 10 + rank.rank)
        # It waits for the first rank's write of the shared object.
        second = threading.Thread(target=ranks[1].put, args=(seq,))

        def meanwhile(second: threading.Thread = second) -> None:
            with pytest.raises(QuotaExceededError):
                stranger.put(1, deployment="job/other", sections=(), nbytes=4 * MIB)
            second.start()
            wait_until(lambda: len(store.quotas._pending) == 2)

        happens: dict[str, Callable[[], None]] = {"put.reserved": meanwhile}
        monkeypatch.setattr(store._faults, "reach", once(happens))
        store.put(ranks[0].manifest(seq), HostMemory(ranks[0].arena), former)
        second.join()
        store.drop(former)
        for rank in ranks:
            rank.check(seq)


def test_no_more_prefetches_wait_than_the_bound(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    prefetcher = Prefetcher(open_store())
    # Its thread has ended, so that nothing leaves the queue.
    prefetcher.close()
    for seq in range(HINTS_MAX):
        prefetcher.hint("a/actor", seq)
    assert "is full" not in caplog.text
    prefetcher.hint("a/actor", HINTS_MAX)
    assert f"version {HINTS_MAX} of a/actor is not prefetched" in caplog.text
