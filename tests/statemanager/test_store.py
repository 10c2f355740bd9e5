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
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.residency import TierName
from plexrl.statemanager.store import Lease, Store
from plexrl.statemanager.tier import Tier
from plexrl.statemanager.versions import Extent, Manifest, VersionKind
from tests.statemanager.host_memory import HostMemory

PAGE = 4096
SHARDS = st.integers(0, 2)
SEQS = st.integers(0, 3)
NAMES = st.tuples(SHARDS, SEQS)


def manifest(rank: int, seq: int, nbytes: int) -> Manifest:
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
    )


class StoreHistory(RuleBasedStateMachine):
    """The model is what each name should hold, and what each open lease should read."""

    @initialize(host_pages=st.integers(1, 12), nvme_pages=st.integers(1, 12))
    def start(self, host_pages: int, nvme_pages: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
        self.bounds = {TierName.HOST: host_pages * PAGE, TierName.NVME: nvme_pages * PAGE}
        self.model: dict[str, npt.NDArray[np.uint8]] = {}
        self.arena = Arena(8 * PAGE)
        self.memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        self.written = 0
        self.open()

    def open(self) -> None:
        self.tiers = {name: Tier(name, self.directory / name.value) for name in TierName}
        self.store = Store(
            self.tiers[TierName.HOST],
            self.bounds[TierName.HOST],
            self.tiers[TierName.NVME],
            self.bounds[TierName.NVME],
        )
        self.leases: list[tuple[ExitStack, Lease, npt.NDArray[np.uint8]]] = []

    def read(self, lease: Lease) -> npt.NDArray[np.uint8]:
        self.memory[:] = 0xEE
        lease.read(HostMemory(self.arena), lease.file.manifest.extents)
        return self.memory[: lease.file.manifest.nbytes]

    @rule(name=NAMES, nbytes=st.integers(0, 5 * PAGE), superseded=st.sets(NAMES))
    def put(self, name: tuple[int, int], nbytes: int, superseded: set[tuple[int, int]]) -> None:
        self.written += 1
        contents = np.random.default_rng(self.written).integers(0, 256, nbytes, dtype=np.uint8)
        self.memory[:nbytes] = contents
        wanted = manifest(*name, nbytes)
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
        assert not in_memory or lease.tier.name == TierName.HOST
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
            there = lease.file.manifest
            digest = "f" * 32 if is_damaged else lease.digest()
            wanted = replace(
                manifest(*name, there.nbytes), stamp=f"adopted{self.written}", digest=digest
            )
            try:
                stored = self.store.adopt(wanted, lease.fd, lease.file.data_offset)
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

    @rule()
    def persist(self) -> None:
        left = set(self.store.persist())
        found = self.store.find(lambda _: True)
        assert {v.manifest.name for v in found if v.tier == TierName.HOST} == left

    @rule()
    def crash(self) -> None:
        """The process is gone, its leases with it, its files as they are."""
        former, self.leases = self.leases, []
        for tier in self.tiers.values():
            tier.close()
        self.open()
        for stack, *_ in former:
            # Closes descriptors, as the process's end would; the old store is nobody's any more.
            stack.close()

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
            on_disk = sum(path.stat().st_size for path in self.tiers[name].directory.iterdir())
            assert on_disk <= self.store.used_bytes(name) <= bound
            if not self.leases:
                found = self.store.find(lambda _: True)
                stored = sum(version.nbytes for version in found if version.tier == name)
                assert self.store.used_bytes(name) == stored

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for stack, *_ in self.leases:
            stack.close()
        for tier in self.tiers.values():
            tier.close()
        self.arena.close()
        shutil.rmtree(self.directory)


def test_any_history_keeps_whole_versions_within_the_bounds() -> None:
    run_state_machine_as_test(
        StoreHistory, settings=settings(max_examples=80, stateful_step_count=30, deadline=None)
    )
