"""Futures of checkpoints: pinned at once, durable a little later."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from plexrl.client.calls.transport import AsyncTransport, Call, Transport
from plexrl.client.data.results import Decoder, SavedCheckpoint
from plexrl.client.futures.futures import AsyncFuture, Future, View
from plexrl.errors import (
    CheckpointNotFoundError,
    ConnectionLostError,
    OperationCancelledError,
    PlexRLError,
    from_wire,
)

POLL_S_MIN = 0.05
POLL_S_MAX = 1.0

Plain = dict[str, Any]


def list_call(job: str) -> Call:
    """The request that lists a job's checkpoints."""
    return Call(method="GET", path=f"/v1/jobs/{quote(job, safe='')}/checkpoints", is_poll=True)


def is_durable(listing: Mapping[str, Any], name: str, seq: int) -> bool:
    """Whether version `seq` of a checkpoint is durable; False while it is being written.

    Raises:
        CheckpointNotFoundError: the checkpoint does not exist, and no node writes it.
        PlexRLError: the error with which the checkpoint failed.
    """
    found = next((each for each in listing["checkpoints"] if each["name"] == name), None)
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


class CheckpointFuture(Future[SavedCheckpoint]):
    """Done once the checkpoint is on the disk; the job's other operations continue meanwhile."""

    def __init__(self, transport: Transport, view: View, decoder: Decoder) -> None:
        super().__init__(transport, view, decoder)
        self._saved: SavedCheckpoint | None = None
        self._pause_s = POLL_S_MIN

    def pinned(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Wait until the checkpoint's version is pinned, for at most `timeout_s` seconds if given:
        training after that does not change the checkpoint.

        Raises as `result`.
        """
        if self._saved is None:
            pinned = Future[SavedCheckpoint](
                self._transport, self._pending.view, self._pending.decoder
            )
            self._saved = pinned.result(timeout_s)
        return self._saved

    def _poll(self, wait_s: float, give_up_at: float | None = None) -> None:
        if self._saved is None:
            super()._poll(wait_s, give_up_at)
            if not self._is_done or self._error is not None:
                return
            self._saved = self._result
            assert self._saved is not None, "a finished operation has a result"
            self._is_done = bool(self._saved["durable"])
        else:
            time.sleep(min(self._pause_s, wait_s))
            self._pause_s = min(POLL_S_MAX, self._pause_s * 1.5)
        if not self._is_done:
            self._check_durable(self._saved, give_up_at)

    def _check_durable(self, saved: SavedCheckpoint, give_up_at: float | None) -> None:
        call = self._pending.limited(list_call(saved["job"]), give_up_at)
        try:
            listing = self._transport.request(call)
            self._pending.unavailable = None
            self._is_done = is_durable(listing.json(), saved["name"], saved["seq"])
            self._result = {**saved, "durable": self._is_done}
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is self._pending.unavailable:
                # The caller's time is over; the checkpoint may still succeed.
                return
            self._is_done, self._error = True, error


class AsyncCheckpointFuture(AsyncFuture[SavedCheckpoint]):
    """Like `CheckpointFuture`, for `await`."""

    def __init__(self, transport: AsyncTransport, view: View, decoder: Decoder) -> None:
        super().__init__(transport, view, decoder)
        self._saved: SavedCheckpoint | None = None
        self._pause_s = POLL_S_MIN

    async def pinned(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """As `CheckpointFuture.pinned`."""
        if self._saved is None:
            pinned = AsyncFuture[SavedCheckpoint](
                self._transport, self._pending.view, self._pending.decoder
            )
            self._saved = await pinned.result(timeout_s)
        return self._saved

    async def _poll(self, wait_s: float, give_up_at: float | None = None) -> None:
        if self._saved is None:
            await super()._poll(wait_s, give_up_at)
            if not self._is_done or self._error is not None:
                return
            self._saved = self._result
            assert self._saved is not None, "a finished operation has a result"
            self._is_done = bool(self._saved["durable"])
        else:
            await asyncio.sleep(min(self._pause_s, wait_s))
            self._pause_s = min(POLL_S_MAX, self._pause_s * 1.5)
        if not self._is_done:
            await self._check_durable(self._saved, give_up_at)

    async def _check_durable(self, saved: SavedCheckpoint, give_up_at: float | None) -> None:
        call = self._pending.limited(list_call(saved["job"]), give_up_at)
        try:
            listing = (await self._transport.request(call)).json()
            self._pending.unavailable = None
            self._is_done = is_durable(listing, saved["name"], saved["seq"])
            self._result = {**saved, "durable": self._is_done}
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is self._pending.unavailable:
                return
            self._is_done, self._error = True, error
