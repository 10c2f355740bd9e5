"""The agent's lease: how long the workers of this node may run without the scheduler.

A scheduler on another machine can be cut off. It takes the node's work elsewhere only after the
lease that it granted last has run out (`plexrl.scheduler.service.connections.node_leases`), so the
workers must have ended by then. The agent ends them; in case it is stopped or busy, each worker
watches the lease itself. Agent and workers are on one machine and share its clock.
"""

import os
import socket
import struct
import threading
import time
from pathlib import Path

CHECK_S = 0.25
"""Interval at which a lease is checked."""
EXIT_LEASE_OVER = 4
"""Exit status of a worker whose node's lease has run out."""

_DEADLINE = struct.Struct("<d")


def clock() -> float:
    """Seconds since the machine started, with the time in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def machine() -> str:
    """Which machine this is, since its start. Workers end with their agent, so an agent that comes
    back on the same machine need not wait for the lease of its predecessor."""
    started = Path("/proc/sys/kernel/random/boot_id")
    return f"{started.read_text().strip() if started.exists() else ''}/{socket.gethostname()}"


class NodeLease:
    """When this node's lease runs out, by `clock`, also in the file that its workers read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._ends_at: float | None = None
        file.unlink(missing_ok=True)

    @property
    def is_needed(self) -> bool:
        """Whether workers run under a lease. On the scheduler's own machine they do not."""
        return self._ends_at is not None

    def extend(self, sent_at: float, lease_s: float | None) -> None:
        """The scheduler has answered a heartbeat that was sent at `sent_at`; None: it grants no
        leases."""
        if lease_s is None:
            return
        ends_at = sent_at + lease_s
        if self._ends_at is None or ends_at > self._ends_at:
            self._ends_at = ends_at
            _write(self.file, ends_at)

    def left_s(self, now: float) -> float:
        """Seconds until the lease runs out; infinite if none is needed."""
        return float("inf") if self._ends_at is None else self._ends_at - now


def end_with_lease(file: Path) -> None:
    """End this process, from a thread, once the lease in `file` has run out."""

    def watch() -> None:
        while True:
            left_s = _read(file) - clock()
            if left_s <= 0.0:
                os.write(2, b"the node's lease has run out: no scheduler has extended it\n")
                os._exit(EXIT_LEASE_OVER)
            time.sleep(min(left_s, CHECK_S))

    threading.Thread(target=watch, name="lease", daemon=True).start()


def _write(file: Path, ends_at: float) -> None:
    """Eight bytes at once, so that a reader never sees a part."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, _DEADLINE.pack(ends_at), 0)
    finally:
        os.close(descriptor)


def _read(file: Path) -> float:
    """The end of the lease; long ago if there is none."""
    try:
        found = file.read_bytes()
    except OSError:
        return 0.0
    return float(_DEADLINE.unpack(found)[0]) if len(found) == _DEADLINE.size else 0.0
