"""Any history of the store, crashes included, against a dictionary."""

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
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

from plexrl.errors import CorruptStateError, StateTierFullError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.lease import Lease
from plexrl.statemanager.store.versions.versions import Extent, Manifest, Section, VersionKind
from plexrl.statemanager.transfer.copy.file_memory import version_memory
from tests.statemanager.host_memory import HostMemory

PAGE = 4096
SHARDS = st.integers(0, 2)
SEQS = st.integers(0, 1)
NAMES = st.tuples(SHARDS, SEQS)


def manifest(rank: int, seq: int, nbytes: int, shared: int = 0) -> Manifest:
    """Its first `shared` pages are what other ranks call a replica."""
    sections = [
        Section(start=0, nbytes=min(shared * PAGE, nbytes), share_key="replica"),
        Section(start=shared * PAGE, nbytes=nbytes - shared * PAGE),
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
    """The model is what each name should hold, and what each open lease should read."""

    @initialize(host_pages=st.integers(1, 24), nvme_pages=st.integers(1, 32))
    def start(self, host_pages: int, nvme_pages: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
        self.now = 0.0
        self.bounds = {TierName.HOST: host_pages * PAGE, TierName.NVME: nvme_pages * PAGE}
        self.model: dict[str, npt.NDArray[np.uint8]] = {}
        self.arena = Arena(8 * PAGE)
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
                segment_bytes_max=4 * PAGE,
                data_threads=1,
                nvme_queue_depth=2,
            ),
            clock=lambda: self.now,
        )
        self.leases: list[tuple[ExitStack, Lease, npt.NDArray[np.uint8]]] = []

    def read(self, lease: Lease) -> npt.NDArray[np.uint8]:
        """By each of the ways there are."""
        self.memory[:] = 0xEE
        lease.load(HostMemory(self.arena))
        loaded = self.memory[: lease.manifest.nbytes].copy()
        read = bytearray(len(loaded))
        lease.read_data(0, memoryview(read))
        assert read == loaded.tobytes()
        return loaded

    @rule(
        name=NAMES,
        nbytes=st.sampled_from([0, 1, PAGE, 2 * PAGE + 7, 3 * PAGE, 5 * PAGE - 1, 5 * PAGE]),
        superseded=st.sets(NAMES, max_size=2),
        shared=st.integers(0, 2),
        same=st.booleans(),
    )
    def put(
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
            contents[: shared * PAGE] = name[1]
        self.memory[:] = 0xDD
        self.memory[:nbytes] = contents
        wanted = manifest(*name, nbytes, shared)
        names = {manifest(*other, 0).name for other in superseded} - {wanted.name}
        try:
            self.store.put(wanted, HostMemory(self.arena), sorted(names))
        except StateTierFullError:
            assert np.array_equal(self.memory[:nbytes], contents)
        else:
            self.model[wanted.name] = contents
        # What was superseded may be gone now, or not; from here on the model knows.
        stored = self.names()
        for gone in names - stored:
            self.model.pop(gone, None)

    @rule(names=st.sets(NAMES), seed=st.integers(0, 250))
    def put_replicas(self, names: set[tuple[int, int]], seed: int) -> None:
        """Ranks that hold the same, or say so: one of them differs now and then."""
        for name in sorted(names):
            self.put(name, 3 * PAGE, set(), 2, seed % 3 > 0)

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
        """What another node would hand over is played by a version that is here under another
        name."""
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
                stored = self.store.adopt(wanted, version_memory(lease.regions, held))
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
        assert {**before, wanted: after[wanted]} == after, "something gave way to a hint"

    @rule(name=NAMES)
    def copy_to_nvme(self, name: tuple[int, int]) -> None:
        before = self.tiers_of_versions()
        try:
            is_there = self.store.copy_to_nvme(manifest(*name, 0).name)
        except StateTierFullError:
            is_there = False
        if is_there:
            assert manifest(*name, 0).name not in self.store.without_nvme_copy()
        assert self.tiers_of_versions() == before

    @rule(seconds=st.one_of(st.none(), st.floats(0, 100)), passed=st.floats(0, 10))
    def expect(self, seconds: float | None, passed: float) -> None:
        self.now += passed
        self.store.expect_use("job/actor", None if seconds is None else self.now + seconds)

    @rule()
    def persist(self) -> None:
        left = set(self.store.persist())
        found = self.store.find(lambda _: True)
        assert {v.manifest.name for v in found if v.tier == TierName.HOST} == left

    @rule()
    def crash(self) -> None:
        """The process is gone, its leases with it, its files as they are."""
        former, self.leases = self.leases, []
        gone = self.store
        for tier in gone._tiers.values():
            # Its locks go with a process; nothing else of it may have an effect any more.
            tier.close()
        self.open()
        for stack, lease, _ in former:
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
    def no_tier_is_over_its_bound(self) -> None:
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


def test_any_history_keeps_whole_versions_within_the_bounds() -> None:
    run_state_machine_as_test(
        StoreHistory, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
