"""What a worker has been asked already: each run happens once, however often it is asked for.

Laws: a run, named by operation and token, is carried out at most once, and whoever asks again gets
its one answer; a token below the highest seen is refused; a mutation is carried out only if it is
the next in order.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.errors import ConflictError, StaleTokenError
from plexrl.wire.operations import MUTATING, OperationKind

KEPT_MAX = 256
"""Answers remembered; far more than can be in flight when a router dies."""
KEPT_BYTES_MAX = 512 << 20
"""Of their payloads; beyond it as few as `KEPT_MIN` are remembered."""
KEPT_MIN = 16
"""Only what a router did not report before it died is asked for again, and it reports at once."""

RunName = tuple[str, int]
"""Operation and token."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, as its frame."""

    header: dict[str, Any]
    payload: bytes


class Replies:
    """The memory of one worker. Its clock is the order of calls."""

    def __init__(self) -> None:
        self.applied_seq = 0
        """Number of the last mutation in the state on the device."""
        self._highest_token = 0
        self._running: set[RunName] = set()
        self._kept: OrderedDict[RunName, Reply] = OrderedDict()
        self._kept_bytes = 0

    def known(self, name: RunName) -> bool:
        """It is running or was answered."""
        return name in self._running or name in self._kept

    def answer(self, name: RunName) -> Reply | None:
        """The kept answer; None while it runs."""
        return self._kept.get(name)

    def begin(self, name: RunName, command: Mapping[str, Any]) -> bool:
        """Admit a run that is not known. False: its mutation is in the state already.

        Raises:
            StaleTokenError: the lock has been granted to another since.
            ConflictError: a mutation before this one has not been applied.
        """
        token = int(command["token"])
        if token < self._highest_token:
            raise StaleTokenError(
                f"token {token} is stale, {self._highest_token} has been seen: the group's lock "
                "is another's",
                token=token,
                highest=self._highest_token,
            )
        self._highest_token = token
        if OperationKind(command["kind"]) in MUTATING:
            seq = int(command["seq"])
            if seq <= self.applied_seq:
                return False
            if seq > self.applied_seq + 1 and not _overwrites(command):
                raise ConflictError(
                    f"mutation {seq} came before mutation {self.applied_seq + 1}",
                    applied_seq=self.applied_seq,
                )
        self._running.add(name)
        return True

    def end(self, name: RunName, reply: Reply) -> None:
        """Remember the answer of a run."""
        self._running.discard(name)
        self._kept[name] = reply
        self._kept_bytes += len(reply.payload)
        while len(self._kept) > (KEPT_MAX if self._kept_bytes <= KEPT_BYTES_MAX else KEPT_MIN):
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.payload)


def _overwrites(command: Mapping[str, Any]) -> bool:
    """A replay may begin with an operation that replaces all state, whatever went before."""
    kind = OperationKind(command["kind"])
    superseding = (OperationKind.SYNC_WEIGHTS, OperationKind.LOAD_CHECKPOINT)
    return bool(command.get("replay")) and kind in superseding
