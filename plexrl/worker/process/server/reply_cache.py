"""Replies that a worker keeps, so that a repeated request never repeats the work.

Invariants:
- A run, named by operation and token, is executed at most once; a repeated request gets the same
  reply.
- A token below the highest one received is refused.
- A mutation is executed only if it is the next one in order.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from plexrl.errors import ConflictError, StaleTokenError
from plexrl.wire.messages import AnyRun, RunName
from plexrl.wire.operations import MUTATING, SUPERSEDING

KEPT_MAX = 256
"""Most replies kept; far more than can be in flight when a router dies."""
KEPT_BYTES_MAX = 512 << 20
"""Payload bytes above which only `KEPT_MIN` replies are kept."""
KEPT_MIN = 16
"""Replies always kept. A router reports a reply at once, so only the newest can be requested again
after a router died."""


@dataclass(frozen=True, slots=True)
class KeptReply:
    """One reply, as header and payload of its frame."""

    header: dict[str, Any]
    payload: bytes


class ReplyCache:
    """The runs that one worker has begun, and their replies."""

    def __init__(self) -> None:
        self.applied_seq = 0
        """Number of the last mutation in the state on the device."""
        self._highest_token = 0
        self._running: set[RunName] = set()
        self._kept: OrderedDict[RunName, KeptReply] = OrderedDict()
        self._kept_bytes = 0

    def known(self, name: RunName) -> bool:
        """Whether the run is executing or has a kept reply."""
        return name in self._running or name in self._kept

    def answer(self, name: RunName) -> KeptReply | None:
        """The kept reply; None while the run executes."""
        return self._kept.get(name)

    def begin(self, command: AnyRun) -> bool:
        """Admit a run that is not known. False: the state contains its mutation already.

        Raises:
            StaleTokenError: the group lock has been granted to another deployment since.
            ConflictError: an earlier mutation has not been applied.
        """
        if command.token < self._highest_token:
            raise StaleTokenError(
                f"token {command.token} is stale, {self._highest_token} has been seen: another "
                "deployment holds the group's lock",
                token=command.token,
                highest=self._highest_token,
            )
        self._highest_token = command.token
        if command.kind in MUTATING:
            if command.seq <= self.applied_seq:
                return False
            # A replay may begin with an operation that replaces all state.
            replaces_all = command.replay and command.kind in SUPERSEDING
            if command.seq > self.applied_seq + 1 and not replaces_all:
                raise ConflictError(
                    f"mutation {command.seq} came before mutation {self.applied_seq + 1}",
                    applied_seq=self.applied_seq,
                )
        self._running.add(command.name)
        return True

    def end(self, name: RunName, reply: KeptReply) -> None:
        """Keep the reply of a run; the oldest replies beyond the bounds are dropped."""
        self._running.discard(name)
        self._kept[name] = reply
        self._kept_bytes += len(reply.payload)
        while len(self._kept) > (KEPT_MAX if self._kept_bytes <= KEPT_BYTES_MAX else KEPT_MIN):
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.payload)
