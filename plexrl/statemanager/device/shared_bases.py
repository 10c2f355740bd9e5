"""Memory of a device that several arenas read: the frozen weights that many adapters lie on.

A base is named by what it holds (a key that its users make of the model and its layout), within one
tenant, one user and one device. Its first user is lent empty memory, fills it and says that it is
whole; from then on it is lent to be read, to later ones and to the first. It is counted once.

Laws:
- A base has users only while they have it mapped: an offload gives it back, a load borrows it.
- One without users stays, whole, for as long as some process that used it lives, or until memory is
  wanted that there is not; then the one that was used longest ago goes first. What is gone is
  filled again by its next user.
- A base whose filler left before it was whole is nobody's: the next user fills a new one.
- A user that left without giving back may still have it mapped, so such memory is let go of in the
  end, and not lent again.
"""

import logging
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from plexrl.errors import DeviceError, DeviceMemoryFullError, OverloadedError
from plexrl.statemanager.device.backend import DeviceBackend, Loan

LOG = logging.getLogger(__name__)

FILL_TIMEOUT_S = 600.0
"""A user waits so long for another one to have filled what both want."""


class BaseKey(NamedTuple):
    """What two users must have in common to share a base."""

    tenant: str
    uid: int
    device: int
    content: str
    """Made by the users, of whatever decides about the bytes."""
    nbytes: int


class Lent(NamedTuple):
    """A base as one user has it."""

    fds: list[int]
    """For the caller to close."""
    loan: Loan
    """What they are of."""
    is_whole: bool


@dataclass(slots=True, eq=False)
class _Base:
    key: BaseKey
    loan: Loan | None
    """Absent while its filler waits for memory."""
    filler: Hashable | None
    """Who is to fill it; absent: it is whole."""
    users: set[Hashable] = field(default_factory=set)
    """Who have it mapped."""
    known: set[Hashable] = field(default_factory=set)
    """Who have had it and live."""
    used_at: int = 0
    was_left: bool = False
    """A user went without a word."""


class SharedBases:
    """Thread-safe. Users are named by whatever the caller likes."""

    def __init__(self, devices: DeviceBackend) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._bases: dict[BaseKey, _Base] = {}
        self._turn = 0

    def await_turn(self, key: BaseKey, user: Hashable) -> None:
        """Return once no other user fills it.

        Raises:
            OverloadedError: one takes too long.
        """
        with self._lock:
            if not self._filled.wait_for(lambda: self._may_borrow(key, user), FILL_TIMEOUT_S):
                raise OverloadedError(
                    f"a base of {key.nbytes} bytes is still being filled by another worker after "
                    f"{FILL_TIMEOUT_S:g} s: try again",
                    retry_after_s=1.0,
                )

    def borrow(self, key: BaseKey, user: Hashable) -> Lent | None:
        """What `user` is lent; if it is not whole, the user fills it and says so (`is_whole`). None
        while another fills it: `await_turn` comes first.

        Raises:
            DeviceMemoryFullError: there is no room, though no base is idle any more.
        """
        with self._lock:
            if not self._may_borrow(key, user):
                return None
            base = self._bases.get(key)
            if base is None or base.filler == user:
                self._drop(base)
                base = self._bases[key] = _Base(key, None, filler=user)
            base.users.add(user)
            base.known.add(user)
            self._turn += 1
            base.used_at = self._turn
            whole = base.filler is None
        if base.loan is None:
            self._lend_empty(base)
        assert base.loan is not None, "its users keep it"
        return Lent(base.loan.descriptors(read_only=whole), base.loan, whole)

    def is_whole(self, key: BaseKey, user: Hashable) -> bool:
        """`user` has filled it: others may read it. False: it was not the one to fill it."""
        with self._lock:
            base = self._bases.get(key)
            if base is None or base.filler != user:
                return False
            base.filler = None
            self._filled.notify_all()
            return True

    def give_back(self, user: Hashable) -> None:
        """`user` has unmapped whatever it had."""
        self._forget(user, left=False)

    def forget(self, user: Hashable) -> None:
        """`user` is gone, and nobody knows what it has mapped."""
        self._forget(user, left=True)

    def make_room(self, device: int) -> bool:
        """Drop the base of a device that has been idle for longest. False: none is idle."""
        with self._lock:
            return self._drop_idle(device)

    def usage(self) -> tuple[int, int]:
        """How many bases there are, and their bytes."""
        with self._lock:
            lent = [base.loan.nbytes for base in self._bases.values() if base.loan is not None]
            return len(lent), sum(lent)

    def _may_borrow(self, key: BaseKey, user: Hashable) -> bool:
        base = self._bases.get(key)
        return base is None or base.filler in (None, user)

    def _lend_empty(self, base: _Base) -> None:
        """Give a base memory. Pages take their time, so others are not held up meanwhile."""
        while base.loan is None:
            try:
                base.loan = self._clean(base.key)
            except DeviceMemoryFullError:
                if not self.make_room(base.key.device):
                    self._call_off(base)
                    raise
            except BaseException:
                self._call_off(base)
                raise

    def _call_off(self, base: _Base) -> None:
        with self._lock:
            self._drop(base)
            self._filled.notify_all()

    def _clean(self, key: BaseKey) -> Loan:
        loan = self._devices.allocate(key.nbytes, device=key.device, uid=key.uid)
        try:
            if not loan.is_clean:
                loan.clear(0, loan.nbytes)
        except BaseException:
            self._devices.recycle(loan)
            raise
        return loan

    def _forget(self, user: Hashable, *, left: bool) -> None:
        with self._lock:
            for base in list(self._bases.values()):
                if user not in base.known:
                    continue
                if left:
                    base.known.discard(user)
                    base.was_left |= user in base.users
                base.users.discard(user)
                if base.filler == user or not base.known:
                    self._drop(base)
                    self._filled.notify_all()

    def _drop_idle(self, device: int) -> bool:
        idle = [b for b in self._bases.values() if b.key.device == device and not b.users]
        if not idle:
            return False
        oldest = min(idle, key=lambda base: base.used_at)
        LOG.info("a base of %d bytes gives way", oldest.key.nbytes)
        self._drop(oldest)
        return True

    def _drop(self, base: _Base | None) -> None:
        if base is None:
            return
        del self._bases[base.key]
        if base.loan is None:
            return
        try:
            if base.was_left or base.users:
                self._devices.free(base.loan)
            else:
                self._devices.recycle(base.loan)
        except DeviceError:
            LOG.exception("a base could not be given back to its device")
