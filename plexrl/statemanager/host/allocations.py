"""Host memory that workers borrow of the host tier, to work in place on state that stays there.

Laws:

- A loan counts in the tier's bound, and on its tenant's account, until it is given back or a
  version takes it over.
- A version takes over memory to which nobody can write any more, by the kernel's word, so what was
  stored once is not changed by whoever made it. Nothing is copied.
- The daemon touches lent memory only while nobody can write to it, nor cut it short.
- What a process still holds of a loan that ended is not lent again before it lets go.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from plexrl.errors import ConflictError, CorruptStateError
from plexrl.statemanager.device.mapping import move
from plexrl.statemanager.device.memory import DeviceMemory, Run
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.eviction.tier_allocator import Rooms
from plexrl.statemanager.host.free_ranges import Piece
from plexrl.statemanager.host.lending_pool import LendingPool
from plexrl.statemanager.host.ofd_locks import (
    has_holder,
    has_writer,
    open_for_reader,
    open_for_writer,
)
from plexrl.statemanager.store.catalog import Catalog
from plexrl.statemanager.store.objects import StoredObject
from plexrl.statemanager.store.saving import Given

HOST = TierName.HOST


@dataclass(slots=True, eq=False, kw_only=True)
class HostLoan:
    """Memory lent to one rank."""

    piece: Piece
    tenant: str
    owner: str
    """What it may be lent to again without being cleared: a deployment and its rank."""

    @property
    def description(self) -> str:
        """For messages."""
        return f"host memory of {self.owner!r}"


@dataclass(slots=True, eq=False, kw_only=True)
class HostState:
    """What a rank has in host memory. Changed in the rank's turn only."""

    start: int
    """Where it begins among the places of the rank's slices: behind the arena on the device."""
    nbytes: int
    tenant: str
    owner: str
    """Deployment and rank."""
    loan: HostLoan | None = None
    """What it works on, or has given up for a version to take; absent: nothing was lent since the
    last version."""
    base: StoredObject | None = None
    """A version's object, held in place for the rank to read from."""
    base_piece: Piece | None = None


class HostLoans:
    """Thread-safe; a state's own changes are in its rank's turn."""

    def __init__(self, catalog: Catalog, pool: LendingPool, rooms: Rooms) -> None:
        self._catalog = catalog
        self._pool = pool
        self._rooms = rooms
        self._lent: set[HostLoan] = set()
        self._ended: set[HostLoan] = set()
        """Of these a process still has something mapped."""

    def recover(self) -> None:
        """Keep what workers hold of a daemon before this one, until they say or let go."""
        for piece in self._pool.claim_held():
            loan = HostLoan(piece=piece, tenant="", owner="")
            with self._catalog.lock:
                self._catalog.used_bytes[HOST] += piece.nbytes
                self._ended.add(loan)

    def lend(self, state: HostState) -> None:
        """Lend a rank memory, of zeros or of what it left there itself.

        Raises:
            StateTierFullError: the host tier has no room, whatever is moved.
        """
        self.sweep()
        nbytes = state.nbytes
        loan = HostLoan(piece=Piece(-1, 0, nbytes), tenant=state.tenant, owner=state.owner)
        self._rooms.make(loan, nbytes, nbytes, host_only=True)
        try:
            loan.piece = self._pool.alloc_apart(nbytes, state.owner)
        except BaseException:
            with self._catalog.lock:
                self._catalog.give_back(HOST, nbytes)
            raise
        with self._catalog.lock:
            self._lent.add(loan)
        state.loan = loan

    def adopt(self, fd: int, state: HostState) -> bool:
        """Have a rank keep its loan of a daemon before this one, by its descriptor; whether it is
        known."""
        piece = self._pool.find_apart(fd)
        with self._catalog.lock:
            for loan in self._ended:
                if loan.piece == piece and loan.piece.nbytes == state.nbytes:
                    self._ended.discard(loan)
                    loan.tenant, loan.owner = state.tenant, state.owner
                    self._lent.add(loan)
                    state.loan = loan
                    return True
        return False

    def adopt_base(self, fd: int, state: HostState, shard: tuple[str, int]) -> bool:
        """Hold the object of one of the rank's versions again, by its reader's descriptor; whether
        there is one."""
        piece = self._pool.find_apart(fd)
        with self._catalog.lock:
            for version in self._catalog.current.values():
                if (version.manifest.deployment, version.manifest.rank) != shard:
                    continue
                for found in version.objects:
                    if piece is not None and found.pieces == (piece,):
                        self._hold(state, found)
                        return True
        return False

    def hold(self, state: HostState, found: StoredObject) -> bool:
        """Have the rank read from an object where it is, in place of what it read from before;
        whether it lies in a file of its own, where that can be."""
        with self._catalog.lock:
            pieces = found.pieces or ()
            if len(pieces) != 1 or not self._pool.is_apart(pieces[0]):
                return False
            self._hold(state, found)
            return True

    def let_go(self, state: HostState) -> None:
        """The rank no longer reads from its base."""
        with self._catalog.lock:
            if state.base is not None:
                self._catalog.release([state.base], HOST)
            state.base = state.base_piece = None

    def end(self, state: HostState) -> None:
        """The rank needs none of it any more."""
        self.let_go(state)
        self.take_back(state)

    def take_back(self, state: HostState) -> None:
        """The rank no longer needs what it was lent."""
        loan, state.loan = state.loan, None
        if loan is not None:
            with self._catalog.lock:
                self._lent.discard(loan)
                self._ended.add(loan)
        self.sweep()

    def _check_given(self, loan: HostLoan) -> None:
        fd = self._pool.descriptor(loan.piece.segment)
        if has_writer(fd):
            raise ConflictError(
                f"{loan.description} is still mapped for writing: its worker must end that first"
            )
        if not self._pool.lent(loan.piece).is_intact():
            raise CorruptStateError(
                f"{loan.description} was cut short while it was lent: load the last version"
            )

    def given(self, state: HostState, section: int) -> Given:
        """What a rank has in host memory, for a version that it makes a section of.

        Raises:
            ConflictError: the rank has nothing there, or can still write to it.
            CorruptStateError: it cut its memory short.
        """
        if state.loan is not None:
            self._check_given(state.loan)
            taken = partial(self._taken, state)
            return Given(section=section, piece=state.loan.piece, taken=taken)
        if state.base is None:
            raise ConflictError(
                f"{state.owner!r} has no optimizer state in host memory: borrow memory for it first"
            )
        return Given(section=section, found=state.base)

    def open(self, state: HostState, *, writable: bool) -> list[int]:
        """Descriptors of the rank's memory, the one to read with first; the caller closes them."""
        piece = state.loan.piece if state.loan is not None else state.base_piece
        assert piece is not None
        path = str(self._pool.lent(piece).path)
        found = [open_for_reader(path)]
        if writable:
            try:
                found.append(open_for_writer(path))
            except BaseException:
                os.close(found[0])
                raise
        return found

    def memory(self, state: HostState, device: DeviceMemory) -> DeviceMemory:
        """The rank's arena and its memory here as one."""
        piece = state.loan.piece if state.loan is not None else state.base_piece
        if piece is None:
            return device
        return _Joined(device, state, self._pool.address(piece))

    def lent_bytes(self, tenant: str | None = None) -> int:
        """Lent to a tenant (absent: to all). The catalog's lock is held."""
        loans = self._lent | self._ended
        return sum(loan.piece.nbytes for loan in loans if tenant in (None, loan.tenant))

    def sweep(self) -> None:
        """Take in what ended loans left, as far as nobody holds it."""
        with self._catalog.lock:
            for loan in list(self._ended):
                if not has_holder(self._pool.descriptor(loan.piece.segment)):
                    self._ended.discard(loan)
                    self._catalog.give_back(HOST, loan.piece.nbytes)
                    self._pool.free([loan.piece])

    def _taken(self, state: HostState, found: StoredObject) -> None:
        """A version took over the rank's loan, which the rank reads from henceforth. The catalog's
        lock is held."""
        assert state.loan is not None
        self._lent.discard(state.loan)
        state.loan = None
        self._hold(state, found)

    def _hold(self, state: HostState, found: StoredObject) -> None:
        self._catalog.acquire([found], HOST)
        former, state.base = state.base, found
        assert found.pieces is not None
        state.base_piece = found.pieces[0]
        if former is not None:
            self._catalog.release([former], HOST)


class _Joined:
    """As `DeviceMemory`: an arena on the device, and host memory behind it."""

    def __init__(self, device: DeviceMemory, state: HostState, address: int) -> None:
        self._device = device
        self._start = state.start
        self._address = address
        self.nbytes = state.start + state.nbytes

    def read(self, runs: Sequence[Run]) -> None:
        """As `DeviceMemory.read`."""
        self._device.read([run for run in runs if run.offset < self._start])
        for run in runs:
            if run.offset >= self._start:
                move(run.address, self._address + run.offset - self._start, run.nbytes)

    def write(self, runs: Sequence[Run]) -> None:
        """As `DeviceMemory.write`."""
        self._device.write([run for run in runs if run.offset < self._start])
        for run in runs:
            if run.offset >= self._start:
                move(self._address + run.offset - self._start, run.address, run.nbytes)
