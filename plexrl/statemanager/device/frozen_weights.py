"""Cache of frozen weights in device memory, which several arenas map read-only.

The key of an entry names the weights' contents (clients derive it from the model and its layout),
within one tenant, user and device. The first client gets empty memory, fills it and reports that it
is filled; after that the entry is mapped read-only. Its memory counts once.

Invariants:

- A client counts as a user only while it has the entry mapped: an offload returns it, a load
  borrows it again.
- An unused entry stays cached while a process that used it lives, or until memory is short. Then
  the least recently used entry is evicted. The next client fills it again.
- An entry whose filler left before it was filled is dropped.
- A client that disconnected may still have the entry mapped, so the memory is freed, not reused.
"""

import logging
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from plexrl.errors import DeviceError, DeviceMemoryFullError, OverloadedError
from plexrl.statemanager.device.backend import DeviceAllocation, DeviceBackend
from plexrl.statemanager.device.filled_allocation import allocate_filled

LOG = logging.getLogger(__name__)

FILL_TIMEOUT_S = 600.0
"""Timeout of waiting for another client to fill the weights."""


class WeightsKey(NamedTuple):
    """Key of an entry: clients with equal keys share it."""

    tenant: str
    uid: int
    device: int
    content: str
    """Derived by the clients from everything that determines the bytes."""
    nbytes: int


class WeightsMapping(NamedTuple):
    """An entry as borrowed by one client."""

    fds: list[int]
    """The caller closes them."""
    allocation: DeviceAllocation
    """The memory that the descriptors refer to."""
    is_whole: bool


@dataclass(slots=True, eq=False)
class _Entry:
    key: WeightsKey
    allocation: DeviceAllocation | None
    """Absent while the filler waits for memory."""
    filler: Hashable | None
    """Client that fills the entry; absent: it is filled."""
    users: set[Hashable] = field(default_factory=set)
    """Clients that have it mapped."""
    clients: set[Hashable] = field(default_factory=set)
    """Connected clients that have borrowed it."""
    used_at: int = 0
    left_mapped: bool = False
    """A client disconnected without unmapping it."""


class FrozenWeightsCache:
    """Frozen weights by key. Thread-safe. A client is identified by any hashable value."""

    def __init__(self, devices: DeviceBackend) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._entries: dict[WeightsKey, _Entry] = {}
        self._clock = 0

    def wait_until_filled(self, key: WeightsKey, user: Hashable) -> None:
        """Wait until no other client fills the weights.

        Raises:
            OverloadedError: the wait timed out.
        """
        with self._lock:
            if not self._filled.wait_for(lambda: self._may_borrow(key, user), FILL_TIMEOUT_S):
                raise OverloadedError(
                    f"frozen weights of {key.nbytes} bytes are still being filled by another "
                    f"worker after {FILL_TIMEOUT_S:g} s: try again",
                    retry_after_s=1.0,
                )

    def borrow(self, key: WeightsKey, user: Hashable) -> WeightsMapping | None:
        """Borrow the weights for `user`; None while another client fills them: call
        `wait_until_filled` first. If `is_whole` is false, `user` fills the weights and calls
        `mark_filled`.

        Raises:
            DeviceMemoryFullError: the device is full and no entry is idle.
        """
        with self._lock:
            if not self._may_borrow(key, user):
                return None
            entry = self._entries.get(key)
            if entry is None or entry.filler == user:
                self._drop(entry)
                entry = self._entries[key] = _Entry(key, None, filler=user)
            entry.users.add(user)
            entry.clients.add(user)
            self._clock += 1
            entry.used_at = self._clock
            whole = entry.filler is None
        if entry.allocation is None:
            self._allocate_empty(entry)
        assert entry.allocation is not None, "an entry with users is not evicted"
        return WeightsMapping(
            entry.allocation.descriptors(read_only=whole), entry.allocation, whole
        )

    def mark_filled(self, key: WeightsKey, user: Hashable) -> bool:
        """Record that `user` has filled the weights; returns False if it is not the filler."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.filler != user:
                return False
            entry.filler = None
            self._filled.notify_all()
            return True

    def give_back(self, user: Hashable) -> None:
        """Record that `user` has unmapped all weights."""
        self._forget(user, left=False)

    def forget(self, user: Hashable) -> None:
        """Record that `user` disconnected; it may still have weights mapped."""
        self._forget(user, left=True)

    def has_memory(self, key: WeightsKey) -> bool:
        """Whether a client that borrows the weights needs no more memory."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and entry.allocation is not None

    def evict_idle(self, device: int, keep: WeightsKey | None = None) -> bool:
        """Evict the least recently used idle entry of a device, but not `keep`; returns False if
        there is none."""
        with self._lock:
            idle = [
                each
                for key, each in self._entries.items()
                if key.device == device and key != keep and not each.users
            ]
            if not idle:
                return False
            oldest = min(idle, key=lambda entry: entry.used_at)
            LOG.info("frozen weights of %d bytes are evicted", oldest.key.nbytes)
            self._drop(oldest)
            return True

    def _may_borrow(self, key: WeightsKey, user: Hashable) -> bool:
        entry = self._entries.get(key)
        return entry is None or entry.filler in (None, user)

    def _allocate_empty(self, entry: _Entry) -> None:
        """Allocate an entry's memory, without the lock, because touching pages is slow."""
        while entry.allocation is None:
            try:
                key = entry.key
                entry.allocation = allocate_filled(
                    self._devices, key.nbytes, device=key.device, uid=key.uid
                )
            except DeviceMemoryFullError:
                if not self.evict_idle(entry.key.device):
                    self._abandon(entry)
                    raise
            except BaseException:
                self._abandon(entry)
                raise

    def _abandon(self, entry: _Entry) -> None:
        with self._lock:
            self._drop(entry)
            self._filled.notify_all()

    def _forget(self, user: Hashable, *, left: bool) -> None:
        with self._lock:
            for entry in list(self._entries.values()):
                if user not in entry.clients:
                    continue
                if left:
                    entry.clients.discard(user)
                    entry.left_mapped |= user in entry.users
                entry.users.discard(user)
                if entry.filler == user or not entry.clients:
                    self._drop(entry)
                    self._filled.notify_all()

    def _drop(self, entry: _Entry | None) -> None:
        if entry is None:
            return
        del self._entries[entry.key]
        if entry.allocation is None:
            return
        try:
            if entry.left_mapped or entry.users:
                self._devices.free(entry.allocation)
            else:
                self._devices.recycle(entry.allocation)
        except DeviceError:
            LOG.exception("frozen weights could not be freed on their device")
