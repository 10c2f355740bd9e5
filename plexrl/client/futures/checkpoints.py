"""Futures of checkpoints: pinned at once, durable a little later."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from plexrl.client.calls.transport import Call, Steps
from plexrl.client.data.results import Decoder, SavedCheckpoint
from plexrl.client.futures.futures import AsyncFuture, Future, Pending
from plexrl.errors import (
    CheckpointNotFoundError,
    OperationCancelledError,
    PlexRLError,
    from_wire,
)
from plexrl.wire.messages.views import OperationView

if TYPE_CHECKING:
    from plexrl.client.calls.controller import Controller

POLL_S_MIN = 0.05
POLL_S_MAX = 1.0


def list_call(job: str) -> Call:
    """The request that lists a job's checkpoints."""
    return Call(method="GET", path=f"/v1/jobs/{quote(job, safe='')}/checkpoints", is_poll=True)


def is_durable(listing: Mapping[str, Any], name: str, seq: int) -> bool:
    """Whether version `seq` of a checkpoint is durable; False while it is being written.

    Raises:
        CheckpointNotFoundError: the checkpoint does not exist, and no node writes it.
        PlexRLError: the error with which the checkpoint failed.
    """
    found = next(
        (checkpoint for checkpoint in listing["checkpoints"] if checkpoint["name"] == name), None
    )
    if found is None:
        if listing["failed"]:
            # A node that does not reply may be the one that writes the checkpoint.
            return False
        raise CheckpointNotFoundError(
            f"checkpoint {name!r} does not exist, and no node writes it: its node was restarted, "
            "or a retention policy deleted it; save it again"
        )
    if found["state"] == "failed":
        raise from_wire(found["error"])
    if found["state"] == "cancelled":
        raise OperationCancelledError(f"checkpoint {name!r} was cancelled: save it again")
    if found["state"] != "durable":
        return False
    if seq != found["seq"]:
        raise CheckpointNotFoundError(
            f"checkpoint {name!r} exists as version {found['seq']}, not {seq}: version {seq} was "
            "replaced, or its node was restarted before it was written; save it again"
        )
    return True


class PendingCheckpoint(Pending[SavedCheckpoint]):
    """A checkpoint that is first pinned, then written to the disk."""

    def __init__(
        self, view: OperationView, decoder: Decoder, controller: "Controller | None"
    ) -> None:
        super().__init__(view, decoder, controller)
        self._saved: SavedCheckpoint | None = None
        self._pause_s = POLL_S_MIN

    def pinned(self, timeout_s: float | None) -> Steps[SavedCheckpoint]:
        """Wait until the version is pinned."""
        if self._saved is None:
            pinned = Pending[SavedCheckpoint](self.view, self.decoder, self._controller)
            self._saved = yield from pinned.result(timeout_s)
        return self._saved

    def poll(self, wait_s: float, give_up_at: float | None) -> Steps[None]:
        """Ask once whether the version is pinned, or after that, whether it is on the disk."""
        if self._saved is None:
            yield from super().poll(wait_s, give_up_at)
            if not self.is_done or self.error is not None:
                return
            self._saved = self._result
            assert self._saved is not None, "a finished operation has a result"
            self.is_done = bool(self._saved["durable"])
        else:
            yield min(self._pause_s, wait_s)
            self._pause_s = min(POLL_S_MAX, self._pause_s * 1.5)
        if not self.is_done:
            yield from self._check_durable(self._saved, give_up_at)

    def _check_durable(self, saved: SavedCheckpoint, give_up_at: float | None) -> Steps[None]:
        response = yield from self.tried(list_call(saved["job"]), give_up_at)
        if response is None:
            return
        try:
            self.is_done = is_durable(response.json(), saved["name"], saved["seq"])
            self._result = {**saved, "durable": self.is_done}
        except PlexRLError as error:
            self.is_done, self.error = True, error


class CheckpointFuture(Future[SavedCheckpoint]):
    """Done once the checkpoint is on the disk; the job's other operations continue meanwhile."""

    _steps = PendingCheckpoint
    _pending: PendingCheckpoint

    def pinned(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Wait until the checkpoint's version is pinned, for at most `timeout_s` seconds if given:
        training after that does not change the checkpoint.

        Raises as `result`.
        """
        return self._transport.run(self._pending.pinned(timeout_s))


class AsyncCheckpointFuture(AsyncFuture[SavedCheckpoint]):
    """Like `CheckpointFuture`, for `await`."""

    _steps = PendingCheckpoint
    _pending: PendingCheckpoint

    async def pinned(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """As `CheckpointFuture.pinned`."""
        return await self._transport.run(self._pending.pinned(timeout_s))
