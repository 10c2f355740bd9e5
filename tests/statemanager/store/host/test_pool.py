"""The memory pool: one owner per page, within the capacity, and recovered after a crash."""

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plexrl.errors import StateTierFullError
from plexrl.statemanager.layout.ranges import FreeRanges, Piece, subrange
from plexrl.statemanager.store.tiers.host.prefault.prefaulted_pool import PrefaultedPool
from plexrl.statemanager.store.tiers.host.segment import HostSegment
from tests.examples import examples
from tests.statemanager.conftest import MIB, wait_until

PAGE = 4096
TENANTS = ("", "ours", "theirs")


@pytest.fixture
def directory() -> Iterator[Path]:
    """On a memory file system."""
    path = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def resident(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 10))))
def test_free_ranges_are_a_set_of_bytes(steps: list[tuple[bool, int, int]]) -> None:
    free, oracle = FreeRanges(), set[int]()
    for adds, offset, nbytes in steps:
        span = set(range(offset, offset + nbytes))
        if adds:
            for byte in sorted(span - oracle):
                free.add(Piece(0, byte, 1))
            oracle |= span
        else:
            free.remove(Piece(0, offset, nbytes))
            oracle -= span
        ranges = list(free)
        assert {b for p in ranges for b in range(p.offset, p.offset + p.nbytes)} == oracle
        assert free.nbytes == len(oracle)
        ends = [piece.offset + piece.nbytes for piece in ranges]
        assert not set(ends) & {piece.offset for piece in ranges}, "neighbours are not merged"


@given(st.sets(st.integers(0, 40)), st.integers(1, 45))
def test_an_allocation_uses_as_few_ranges_as_possible(free_bytes: set[int], wanted: int) -> None:
    free = FreeRanges(Piece(0, byte, 1) for byte in free_bytes)
    lengths = sorted((piece.nbytes for piece in free), reverse=True)
    taken = free.take(wanted)
    found = [byte for piece in taken for byte in range(piece.offset, piece.offset + piece.nbytes)]
    assert len(found) == len(set(found)) == min(wanted, len(free_bytes))
    assert set(found) <= free_bytes
    fewest = next((n for n in range(len(lengths)) if sum(lengths[:n]) >= wanted), len(lengths))
    assert len(taken) == fewest


@given(st.lists(st.integers(1, 5), max_size=5), st.integers(0, 25), st.integers(0, 25))
def test_a_subrange_is_a_slice(sizes: list[int], start: int, nbytes: int) -> None:
    pieces = [Piece(index, 10 * index, size) for index, size in enumerate(sizes)]

    def places(found: list[Piece]) -> list[tuple[int, int]]:
        return [(p.segment, byte) for p in found for byte in range(p.offset, p.offset + p.nbytes)]

    assert places(subrange(pieces, start, nbytes)) == places(pieces)[start : start + nbytes]


class PoolHistory(RuleBasedStateMachine):
    """Every allocated page holds its owner's number, and a holder of one tenant's segment never
    reads another tenant's number."""

    @initialize(bound=st.integers(0, 40), segment=st.integers(1, 16))
    def start(self, bound: int, segment: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm"))
        self.bound, self.segment = bound * PAGE, segment * PAGE
        self.aside = 0
        self.owned: dict[int, tuple[Piece, ...]] = {}
        self.lent: list[tuple[str, int]] = []
        self.count = 0
        self.open()

    def open(self) -> None:
        self.pool = PrefaultedPool(self.directory, self.bound, segment_bytes_max=self.segment)

    def used(self) -> int:
        return sum(piece.nbytes for pieces in self.owned.values() for piece in pieces)

    @rule(nbytes=st.integers(1, 12 * PAGE), tenant=st.integers(0, 2))
    def alloc(self, nbytes: int, tenant: int) -> None:
        whole = -(-nbytes // PAGE) * PAGE
        fits = self.used() + self.aside + whole <= self.bound
        try:
            pieces = self.pool.alloc(nbytes, TENANTS[tenant])
        except StateTierFullError:
            assert not fits
            return
        assert fits
        assert sum(piece.nbytes for piece in pieces) == whole
        self.count += 1
        number = 3 * self.count + tenant
        self.owned[number] = pieces
        for piece in pieces:
            self.pool.view(piece)[:] = number.to_bytes(8, "little") * (piece.nbytes // 8)

    @precondition(lambda self: self.owned)
    @rule(index=st.integers(0, 100))
    def free(self, index: int) -> None:
        self.pool.free(self.owned.pop(sorted(self.owned)[index % len(self.owned)]))

    @precondition(lambda self: self.owned and len(self.lent) < 20)
    @rule(index=st.integers(0, 100))
    def lend(self, index: int) -> None:
        number = sorted(self.owned)[index % len(self.owned)]
        fd = os.dup(self.pool.descriptor(self.owned[number][0].segment))
        self.lent.append((TENANTS[number % 3], fd))

    @rule(pages=st.integers(0, 3))
    def reserve_other(self, pages: int) -> None:
        if self.used() + pages * PAGE > self.bound:
            return
        self.pool.reserve_other(pages * PAGE - self.aside)
        self.aside = pages * PAGE

    @rule(nbytes=st.integers(0, 20 * PAGE))
    def prefault(self, nbytes: int) -> None:
        self.pool.prefault(nbytes)
        if self.pool._prefaulting is not None:
            self.pool._prefaulting.join()
        room = (self.bound - self.aside) // PAGE * PAGE
        assert self.pool.resident_bytes >= min(nbytes // PAGE * PAGE, room)

    @rule(forgotten=st.integers(0, 3))
    def restart(self, forgotten: int) -> None:
        self.pool.close()
        self.open()
        for number in sorted(self.owned)[:forgotten]:
            del self.owned[number]
        for number, pieces in self.owned.items():
            assert self.pool.claim(pieces, TENANTS[number % 3])
            assert not self.pool.claim(pieces, TENANTS[number % 3]), "a range was claimed twice"
            assert not self.pool.claim(pieces, TENANTS[(number + 1) % 3])
        self.pool.remove_unclaimed()
        self.pool.reserve_other(self.aside)

    @invariant()
    def every_owner_has_its_own(self) -> None:
        if not hasattr(self, "pool"):
            return
        for number, pieces in self.owned.items():
            for piece in pieces:
                expected = number.to_bytes(8, "little") * (piece.nbytes // 8)
                assert self.pool.view(piece) == expected
        assert self.pool.used_bytes == self.used()
        self.pool.check()
        assert resident(self.directory) <= self.bound - self.aside

    @invariant()
    def who_was_lent_a_segment_sees_its_own_tenants_bytes_only(self) -> None:
        for tenant, fd in getattr(self, "lent", ()):
            words = np.frombuffer(os.pread(fd, os.fstat(fd).st_size, 0), dtype="<u8")
            seen = set(words.tolist()) - {0}
            assert {TENANTS[number % 3] for number in seen} <= {tenant}

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()
            shutil.rmtree(self.directory)
            for _, fd in self.lent:
                os.close(fd)


def test_any_history_keeps_the_pools_invariants() -> None:
    run_state_machine_as_test(
        PoolHistory,
        settings=settings(max_examples=examples(40), stateful_step_count=30, deadline=None),
    )


def test_freed_memory_stays_resident_and_is_reused(directory: Path) -> None:
    pool = PrefaultedPool(directory, 4 * MIB)
    first = pool.alloc(3 * MIB, "ours")
    pool.free(first)
    assert resident(directory) == 3 * MIB
    assert pool.alloc(3 * MIB, "ours") == first
    pool.close()


def test_prefaulting_makes_memory_resident(directory: Path) -> None:
    pool = PrefaultedPool(directory, 8 * MIB)
    pool.prefault(6 * MIB)
    wait_until(lambda: resident(directory) == 6 * MIB)
    wait_until(lambda: pool.used_bytes == 0)
    assert pool.resident_bytes == 6 * MIB
    pool.close()


def test_pinned_memory_is_resident_and_stays(directory: Path) -> None:
    told: list[tuple[str, int, int]] = []
    pool = PrefaultedPool(
        directory,
        4 * MIB,
        on_map=lambda address, nbytes: told.append(("map", address, nbytes)),
        on_unmap=lambda address, nbytes: told.append(("unmap", address, nbytes)),
    )
    [piece] = pool.alloc(MIB, "ours")
    [(what, address, nbytes)] = told
    assert what == "map"
    assert address <= pool.address(piece) < address + nbytes
    assert resident(directory) == nbytes
    pool.close()
    assert told[1:] == [("unmap", address, nbytes)]


def test_a_truncated_segment_is_not_claimed(directory: Path) -> None:
    pool = PrefaultedPool(directory, 4 * MIB)
    pieces = pool.alloc(MIB, "ours")
    pool.close()
    [path] = directory.iterdir()
    os.truncate(path, MIB // 2)
    again = PrefaultedPool(directory, 4 * MIB)
    assert not again.claim(pieces, "ours")
    assert again.used_bytes == 0
    again.close()


def open_files(directory: Path) -> set[Path]:
    return set(directory.glob("*.segment"))


def test_an_idle_segment_is_reassigned_cleared_and_resident(directory: Path) -> None:
    pool = PrefaultedPool(directory, 4 * MIB)
    [piece] = pieces = pool.alloc(MIB, "ours")
    pool.view(piece)[:] = b"ours" * (MIB // 4)
    pool.free(pieces)
    [other] = pool.alloc(MIB // 2, "theirs")
    assert other.segment == piece.segment
    [rest] = pool.alloc(MIB // 2, "theirs")
    assert not any(pool.view(other)), "another tenant's data is visible"
    assert not any(pool.view(rest))
    assert resident(directory) == MIB
    pool.check()
    pool.close()


def test_a_segment_in_use_is_not_reassigned(directory: Path) -> None:
    pool = PrefaultedPool(directory, 4 * MIB)
    [ours] = pool.alloc(PAGE, "ours")
    [theirs] = pool.alloc(PAGE, "theirs")
    [more] = pool.alloc(PAGE, "ours")
    assert ours.segment == more.segment != theirs.segment
    pool.close()


def test_a_shared_segment_is_deleted_before_its_space_is_reassigned(
    directory: Path,
) -> None:
    pool = PrefaultedPool(directory, MIB)
    [piece] = pieces = pool.alloc(MIB, "ours")
    pool.view(piece)[:] = b"ours" * (MIB // 4)
    kept = os.dup(pool.descriptor(piece.segment))
    before = open_files(directory)
    pool.free(pieces)
    [other] = pool.alloc(MIB, "theirs")
    pool.view(other)[:] = b"them" * (MIB // 4)
    assert other.segment != piece.segment
    assert not open_files(directory) & before
    assert not any(os.pread(kept, MIB, 0))
    assert os.fstat(kept).st_blocks == 0, "a kept descriptor keeps memory allocated"
    os.close(kept)
    pool.close()


def test_a_shared_descriptor_is_read_only(directory: Path) -> None:
    pool = PrefaultedPool(directory, MIB)
    [piece] = pool.alloc(PAGE, "ours")
    fd = pool.descriptor(piece.segment)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(fd, 0)
    pool.close()


def test_recovery_finds_the_segments_tenants_and_deletes_unclaimed_ones(directory: Path) -> None:
    pool = PrefaultedPool(directory, 4 * MIB)
    ours, theirs = pool.alloc(PAGE, "ours"), pool.alloc(PAGE, "theirs")
    for piece in (*ours, *theirs):
        pool.view(piece)[:] = b"x" * PAGE
    pool.close()
    again = PrefaultedPool(directory, 4 * MIB)
    assert again.claim(ours, "ours")
    again.remove_unclaimed()
    assert len(open_files(directory)) == 1
    assert not again.claim(theirs, "theirs")
    [new] = again.alloc(PAGE, "theirs")
    assert new.segment not in {ours[0].segment, theirs[0].segment}
    again.check()
    again.close()


def test_unclaimed_pages_stay_during_recovery(directory: Path) -> None:
    """Each recovered header reserves capacity, which may be smaller than before."""
    pool = PrefaultedPool(directory, 2 * MIB)
    versions = [pool.alloc(MIB, "ours") for _ in range(2)]
    for pieces in versions:
        for piece in pieces:
            pool.view(piece)[:] = b"full" * (piece.nbytes // 4)
    pool.close()
    again = PrefaultedPool(directory, MIB)
    for pieces in versions:
        assert again.claim(pieces, "ours")
        again.reserve_other(PAGE)
    again.remove_unclaimed()
    for pieces in versions:
        for piece in pieces:
            assert again.view(piece) == b"full" * (piece.nbytes // 4)
    with pytest.raises(StateTierFullError):
        again.alloc(PAGE, "ours")
    again.check()
    again.close()


def test_idle_pinned_memory_is_freed_for_another_tenant(directory: Path) -> None:
    pinned: dict[int, int] = {}
    pool = PrefaultedPool(
        directory, MIB, on_map=pinned.__setitem__, on_unmap=lambda at, _: pinned.__delitem__(at)
    )
    [piece] = pieces = pool.alloc(MIB, "ours")
    with pytest.raises(StateTierFullError):
        pool.alloc(PAGE, "theirs")
    pool.descriptor(piece.segment)
    pool.free(pieces)
    pool.alloc(MIB, "theirs")
    assert sum(pinned.values()) == MIB
    pool.close()
    assert not pinned


def test_expected_writes_are_prefaulted(directory: Path) -> None:
    pool = PrefaultedPool(directory, 4 * MIB)
    try:
        first = pool.alloc(MIB, "")
        pool.prefault_free(2 * MIB)
        wait_until(lambda: pool.resident_bytes == 3 * MIB)
        assert resident(directory) >= 3 * MIB
        # Never more than the capacity.
        pool.prefault_free(64 * MIB)
        wait_until(lambda: pool.resident_bytes == 4 * MIB)
        second = pool.alloc(3 * MIB, "")
        pool.free((*first, *second))
        pool.check()
    finally:
        pool.close()


def test_pages_that_cannot_be_prefaulted_do_not_count_as_resident(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no memory left")

    pool = PrefaultedPool(directory, 4 * MIB)
    with monkeypatch.context() as patched:
        patched.setattr(HostSegment, "fallocate", fail)
        pool.prefault(2 * MIB)
        assert pool._prefaulting is not None
        pool._prefaulting.join()
    assert pool.resident_bytes == 0
    pieces = pool.alloc(2 * MIB, "")
    assert resident(directory) == pool.resident_bytes == 2 * MIB
    pool.free(pieces)
    pool.check()
    pool.close()
