"""Back-off of a deployment whose runs meet a condition that passes, such as a full disk."""

from dataclasses import dataclass
from typing import Final

import msgspec

from plexrl.ids import DeploymentId, NodeId

BACKOFF_S_MIN: Final = 1.0
BACKOFF_S_MAX: Final = 15.0
"""Back-off before the first retry, doubled with each one that follows, and its bound: free space on
a disk is noticed soon."""


class ForeignMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a GPU that a process holds which is no worker."""

    node: NodeId
    gpu: int
    pid: int
    """Id of the process, as the node's StateManager sees it."""
    nbytes: int


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Why a deployment's work is delayed, and when it is retried."""

    until: float = 0.0
    reason: str = ""
    """May name deployments of other tenants: `reason_for` words it for a reader."""
    code: str = ""
    """Code of the condition that the last run met, such as `storage_full`; empty: none."""
    since: float = 0.0
    tries: int = 0
    """Runs in a row that met the condition."""
    foreign: tuple[ForeignMemory, ...] = ()
    """What the last run found on its GPUs; empty: nothing, or it met another condition."""
    named: tuple[DeploymentId, ...] = ()
    """The deployments that `reason` names, besides its own."""

    def report(
        self,
        code: str,
        reason: str,
        now: float,
        foreign: tuple[ForeignMemory, ...] = (),
        named: tuple[DeploymentId, ...] = (),
    ) -> None:
        """A run met a condition: operators see it."""
        if not self.code:
            self.since = now
        self.code = code
        self.reason = reason
        self.foreign = foreign
        self.named = named

    def explain(self, reason: str, named: tuple[DeploymentId, ...] = ()) -> None:
        """Set the reason alone: what delays the work is not a condition."""
        self.reason = reason
        self.named = named

    def retry_later(self, now: float, longest_s: float = BACKOFF_S_MAX) -> None:
        """Wait longer than before the last retry, but at most `longest_s`."""
        self.until = now + min(BACKOFF_S_MIN * 2.0 ** min(self.tries, 16), longest_s)
        self.tries += 1

    def wait(self, until: float, reason: str, named: tuple[DeploymentId, ...] = ()) -> None:
        """Wait until `until`, for a reason other than a condition."""
        self.until = until
        self.explain(reason, named)

    def clear(self) -> None:
        """A run met no condition, or nothing is left to be tried again."""
        if self.code:
            self.code = ""
            self.tries = 0
            self.since = 0.0
            self.until = 0.0
            self.foreign = ()
