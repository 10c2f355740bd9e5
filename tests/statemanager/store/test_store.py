"""Random histories of the store, crashes included, against a dictionary."""

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plexrl.errors import CorruptStateError, OperationCancelledError, StateTierFullError
from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES, THREADED_BYTES_MIN
from plexrl.statemanager.bytes.file_data import FileData
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.layout.versions import Extent, Manifest, Section, VersionKind
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.versions.lease import VersionLease
from tests.examples import examples
from tests.statemanager.conftest import wait_until
from tests.statemanager.host_memory import HostMemory

PAGE = 4096
SHARDS = st.integers(0, 2)
SEQS = st.integers(0, 1)
NAMES = st.tuples(SHARDS, SEQS)


def manifest(rank: int, seq: int, nbytes: int, shared_bytes: int = 0) -> Manifest:
    """A version whose first `shared_bytes` are declared to be a replica."""
    sections = [
        Section(start=0, nbytes=min(shared_bytes, nbytes), share_key="replica"),
        Section(start=shared_bytes, nbytes=nbytes - shared_bytes),
    ]
    return Manifest(
        deployment="job/actor",
        rank=rank,
        world_size=3,
        seq=seq,
        kind=VersionKind.STATE,
        parts=(),
        meta_json="{}",
        slices=(),
        extents=(Extent(arena_offset=0, file_offset=0, nbytes=nbytes),),
        nbytes=nbytes,
        sections=tuple(section for section in sections if section.nbytes > 0),
    )


class StoreHistory(RuleBasedStateMachine):
    """The model stores the expected contents of each name and of each open lease."""

    UNIT = PAGE
    """Unit of sizes and capacities."""
    SIZES: tuple[int, ...] = (0, 1, PAGE, 2 * PAGE + 7, 3 * PAGE, 5 * PAGE - 1, 5 * PAGE)
    HEADER_PAGES = 0
    """Capacity in addition to the drawn units, for headers."""
    DATA_THREADS = 1

    @initialize(host_units=st.integers(1, 24), nvme_units=st.integers(1, 32))
    def start(self, host_units: int, nvme_units: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
        self.now = 0.0
        headers = self.HEADER_PAGES * PAGE
        self.bounds = {
            TierName.HOST: host_units * self.UNIT + headers,
            TierName.NVME: nvme_units * self.UNIT + headers,
        }
        self.model: dict[str, npt.NDArray[np.uint8]] = {}
        self.arena = Arena(max(*self.SIZES, 3 * self.UNIT) + PAGE)
        self.memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        self.written = 0
        self.open()

    def open(self) -> None:
        self.store = Store(
            StateManagerConfig(
                node="n",
                listen="",
                host_dir=str(self.directory / "host"),
                host_bytes=self.bounds[TierName.HOST],
                nvme_dir=str(self.directory / "nvme"),
                nvme_bytes=self.bounds[TierName.NVME],
                segment_bytes_max=4 * PAGE if self.UNIT == PAGE else self.UNIT,
                data_threads=self.DATA_THREADS,
                nvme_queue_depth=2,
            ),
            clock=lambda: self.now,
        )
        self.leases: list[tuple[ExitStack, VersionLease, npt.NDArray[np.uint8]]] = []

    def read(self, lease: VersionLease) -> npt.NDArray[np.uint8]:
        """Read a version both with `load` and with `read_data`."""
        self.memory[:] = 0xEE
        lease.load(HostMemory(self.arena))
        loaded = self.memory[: lease.manifest.nbytes].copy()
        read = bytearray(len(loaded))
        lease.read_data(0, memoryview(read))
        assert read == loaded.tobytes()
        return loaded

    @rule(
        name=NAMES,
        size=st.integers(0, 6),
        superseded=st.sets(NAMES, max_size=2),
        shared=st.integers(0, 2),
        same=st.booleans(),
    )
    def put(
        self,
        name: tuple[int, int],
        size: int,
        superseded: set[tuple[int, int]],
        shared: int,
        same: bool,
    ) -> None:
        self.save(name, self.SIZES[size % len(self.SIZES)], superseded, shared, same)

    def save(
        self,
        name: tuple[int, int],
        nbytes: int,
        superseded: set[tuple[int, int]],
        shared: int,
        same: bool,
    ) -> None:
        self.written += 1
        contents = np.random.default_rng(self.written).integers(0, 256, nbytes, dtype=np.uint8)
        if same:
            contents[: shared * self.UNIT] = name[1]
        self.memory[:] = 0xDD
        self.memory[:nbytes] = contents
        wanted = manifest(*name, nbytes, shared * self.UNIT)
        names = {manifest(*other, 0).name for other in superseded} - {wanted.name}
        try:
            self.store.put(wanted, HostMemory(self.arena), sorted(names))
        except StateTierFullError:
            assert np.array_equal(self.memory[:nbytes], contents)
        else:
            self.model[wanted.name] = contents
        # The store may have dropped superseded versions.
        stored = self.names()
        for gone in names - stored:
            self.model.pop(gone, None)

    @rule(names=st.sets(NAMES), seed=st.integers(0, 250))
    def put_replicas(self, names: set[tuple[int, int]], seed: int) -> None:
        """Ranks save declared replicas; sometimes the bytes differ."""
        for name in sorted(names):
            self.save(name, 3 * self.UNIT, set(), 2, seed % 3 > 0)

    @rule(name=NAMES)
    def drop(self, name: tuple[int, int]) -> None:
        wanted = manifest(*name, 0).name
        self.store.drop([wanted])
        self.model.pop(wanted, None)

    @rule(name=NAMES, in_memory=st.booleans())
    def lease(self, name: tuple[int, int], in_memory: bool) -> None:
        wanted = manifest(*name, 0).name
        if wanted not in self.model:
            return
        stack = ExitStack()
        open_lease = self.store.lease_in_memory if in_memory else self.store.lease
        try:
            lease = stack.enter_context(open_lease(wanted, wanted))
        except StateTierFullError:
            assert in_memory
            return
        assert not in_memory or lease.tier == TierName.HOST
        self.leases.append((stack, lease, self.model[wanted]))

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 10))
    def end_lease(self, index: int) -> None:
        stack, lease, contents = self.leases.pop(index % len(self.leases))
        assert np.array_equal(self.read(lease), contents)
        stack.close()

    @rule(name=NAMES, source=NAMES, is_damaged=st.booleans())
    def adopt(self, name: tuple[int, int], source: tuple[int, int], is_damaged: bool) -> None:
        """Adopt a version of this store under another name, in place of another node's version."""
        held = manifest(*source, 0).name
        if held not in self.model:
            return
        with self.store.lease(held, held) as lease:
            there = lease.manifest
            digest = "f" * 32 if is_damaged else lease.digest()
            wanted = replace(
                manifest(*name, there.nbytes),
                sections=there.sections,
                stamp=f"adopted{self.written}",
                digest=digest,
            )
            try:
                stored = self.store.adopt(wanted, FileData(lease.regions, held))
            except CorruptStateError:
                assert is_damaged
            except StateTierFullError:
                pass
            else:
                assert not is_damaged
                assert (stored.manifest.stamp, stored.manifest.digest) == (wanted.stamp, digest)
                self.model[wanted.name] = self.model[held]

    @rule(name=NAMES)
    def prefetch(self, name: tuple[int, int]) -> None:
        wanted = manifest(*name, 0).name
        if wanted not in self.model:
            return
        before = self.tiers_of_versions()
        is_in_host = self.store.prefetch(wanted, wanted)
        after = self.tiers_of_versions()
        assert is_in_host == (after[wanted] == TierName.HOST)
        assert {**before, wanted: after[wanted]} == after, "a prefetch evicted a version"

    @rule(name=NAMES)
    def copy_to_nvme(self, name: tuple[int, int]) -> None:
        before = self.tiers_of_versions()
        try:
            is_there = self.store.allocator.copy_to_nvme(
                manifest(*name, 0).name, in_background=True
            )
        except StateTierFullError:
            is_there = False
        if is_there:
            assert manifest(*name, 0).name not in self.store.without_nvme_copy()
        assert self.tiers_of_versions() == before

    @rule(seconds=st.one_of(st.none(), st.floats(0, 100)), passed=st.floats(0, 10))
    def expect(self, seconds: float | None, passed: float) -> None:
        self.now += passed
        self.store.allocator.expect_use(
            "job/actor", None if seconds is None else self.now + seconds
        )

    @rule()
    def persist(self) -> None:
        left = set(self.store.persist())
        found = self.store.find(lambda _: True)
        assert {v.manifest.name for v in found if v.tier == TierName.HOST} == left

    @rule()
    def crash(self) -> None:
        """The process and its leases end; its files stay."""
        previous, self.leases = self.leases, []
        gone = self.store
        for tier in gone._tiers.values():
            # The kernel drops the locks of a process that ends.
            tier.close()
        self.open()
        for stack, lease, _ in previous:
            lease.close()
            stack.pop_all()
        gone.plane.close()
        gone._pool.close()

    def names(self) -> set[str]:
        return set(self.tiers_of_versions())

    def tiers_of_versions(self) -> dict[str, TierName]:
        return {version.manifest.name: version.tier for version in self.store.find(lambda _: True)}

    @invariant()
    def what_is_stored_is_what_was_put(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.names() == set(self.model)
        for name, contents in self.model.items():
            with self.store.lease(name, name) as lease:
                assert np.array_equal(self.read(lease), contents), name

    @invariant()
    def no_tier_exceeds_its_capacity(self) -> None:
        if not hasattr(self, "store"):
            return
        for name, bound in self.bounds.items():
            files = (self.directory / name.value).iterdir()
            on_disk = sum(path.stat().st_blocks * 512 for path in files)
            assert self.store.used_bytes(name) <= bound
            assert on_disk <= bound
        if not self.leases:
            self.store.check()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for stack, *_ in self.leases:
            stack.close()
        self.store.close()
        self.arena.close()
        shutil.rmtree(self.directory)


class LargeStoreHistory(StoreHistory):
    """The same histories with versions of several blocks, whose copies use several threads."""

    UNIT = BLOCK_BYTES
    SIZES = (1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 7, 3 * BLOCK_BYTES)
    HEADER_PAGES = 32
    DATA_THREADS = 3

    @initialize(host_units=st.integers(1, 8), nvme_units=st.integers(1, 10))
    def start(self, host_units: int, nvme_units: int) -> None:
        assert max(self.SIZES) > max(2 * BLOCK_BYTES, THREADED_BYTES_MIN)
        super().start(host_units, nvme_units)


def test_any_history_keeps_whole_versions_within_the_capacities() -> None:
    run_state_machine_as_test(
        StoreHistory,
        settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None),
    )


def test_any_history_of_versions_of_several_blocks_keeps_them_whole() -> None:
    run_state_machine_as_test(
        LargeStoreHistory,
        settings=settings(max_examples=examples(8), stateful_step_count=15, deadline=None),
    )


RANKS = 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Host memory for half of what the ranks keep, so that versions are spilled all the time."""
    host = tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm")
    opened = Store(
        StateManagerConfig(
            node="n",
            listen="",
            host_dir=host,
            host_bytes=RANKS * 2 * BLOCK_BYTES,
            nvme_dir=str(tmp_path),
            nvme_bytes=RANKS * 16 * BLOCK_BYTES,
            segment_bytes_max=BLOCK_BYTES,
            data_threads=3,
            nvme_queue_depth=3,
        )
    )
    with closing(opened):
        yield opened
    shutil.rmtree(host)


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_ranks_load_exactly_what_they_saved(store: Store, seed: int) -> None:
    """Four ranks save replicas and own data of several blocks, and load, prefetch and copy them."""
    with ThreadPoolExecutor(RANKS) as threads:
        for each in [threads.submit(_one_rank, store, rank, seed) for rank in range(RANKS)]:
            each.result()
    store.check()
    assert store.replicas.shared
    assert not store.replicas.different


def _one_rank(store: Store, rank: int, seed: int) -> None:
    random = Random(f"{seed} {rank}")
    arena = Arena(3 * BLOCK_BYTES + PAGE)
    memory = np.frombuffer(arena.buffer, dtype=np.uint8)
    name, contents = "", memory[:0].copy()
    for seq in range(1, 7):
        shared = np.random.default_rng([seed, seq]).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
        own_bytes = random.choice([1, BLOCK_BYTES, 2 * BLOCK_BYTES - 7])
        own = np.random.default_rng([seed, seq, rank]).integers(0, 256, own_bytes, dtype=np.uint8)
        previous, contents = name, np.concatenate([shared, own])
        memory[: len(contents)] = contents
        saved = manifest(rank, seq, len(contents), BLOCK_BYTES)
        name = saved.name
        store.put(saved, HostMemory(arena), [previous] if previous else [])
        store.drop([previous])
        for action in random.choices(["load", "read", "prefetch", "copy"], k=3):
            memory[:] = 0xEE
            if action == "load":
                store.load(name, name, HostMemory(arena))
                assert np.array_equal(memory[: len(contents)], contents), (seed, rank, seq)
            elif action == "read":
                # The leases of the other ranks may fill the host tier at this moment.
                with suppress(StateTierFullError):
                    with store.lease_in_memory(name, name) as lease:
                        lease.read_data(0, arena.buffer[: len(contents)])
                    assert np.array_equal(memory[: len(contents)], contents), (seed, rank, seq)
            else:
                # Another rank's save may cancel a background move.
                with suppress(OperationCancelledError):
                    if action == "prefetch":
                        store.prefetch(name, name)
                    else:
                        store.allocator.copy_to_nvme(name, in_background=True)
    arena.close()


def test_a_copy_of_one_deployment_leaves_the_prefetch_of_another(store: Store) -> None:
    with closing(Arena(BLOCK_BYTES)) as arena:
        store.put(manifest(0, 1, BLOCK_BYTES, BLOCK_BYTES), HostMemory(arena))
    name = manifest(0, 1, BLOCK_BYTES, BLOCK_BYTES).name
    allocator = store.allocator
    with ThreadPoolExecutor(1) as pool, allocator.background_move("other/actor") as prefetch:
        copied = pool.submit(allocator.copy_to_nvme, name)
        wait_until(lambda: copied.done() or prefetch.cancelled.is_set())
        assert not prefetch.cancelled.is_set()
    assert copied.result()
    assert store.without_nvme_copy() == []
