"""Checkpoints from a controller's side: pinned at once, durable a little later."""

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
    """The request for all of a job's checkpoints."""
    return Call(method="GET", path=f"/v1/jobs/{quote(job, safe='')}/checkpoints", is_poll=True)


def settled(listing: Mapping[str, Any], name: str, seq: int | None) -> Plain | None:
    """The checkpoint, if it is durable; None while it is being written.

    `seq` absent: of whatever version.

    Raises:
        CheckpointNotFoundError: nobody writes it, and it is not there.
        PlexRLError: it failed; the error is its own.
    """
    found = next((each for each in listing["checkpoints"] if each["name"] == name), None)
    if found is None:
        if listing["failed"]:
            # A node that does not answer may be the one that writes it.
            return None
        raise CheckpointNotFoundError(
            f"checkpoint {name!r} is not there, and nobody writes it: its node was restarted, or a "
            "retention policy deleted it; save it again"
        )
    if found["state"] == "failed":
        raise from_wire(found["error"])
    if found["state"] == "cancelled":
        raise OperationCancelledError(f"checkpoint {name!r} was cancelled: save it again")
    if found["state"] != "durable":
        return None
    if seq not in (None, found["seq"]):
        raise CheckpointNotFoundError(
            f"checkpoint {name!r} is there as of version {found['seq']}, not {seq}: that one was "
            "replaced, or its node was restarted before it was written"
        )
    return dict(found)


class CheckpointFuture(Future[SavedCheckpoint]):
    """Done once the checkpoint is on the disk; the job's other operations go on meanwhile."""

    def __init__(self, transport: Transport, view: View, decoder: Decoder) -> None:
        super().__init__(transport, view, decoder)
        self._saved: SavedCheckpoint | None = None
        self._pause_s = POLL_S_MIN

    def pinned(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Wait until its version is pinned, for at most `timeout_s` seconds where they are given:
        what training does from then on is not in it.

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
            self._look(self._saved, give_up_at)

    def _look(self, saved: SavedCheckpoint, give_up_at: float | None) -> None:
        call = self._pending.patient(list_call(saved["job"]), give_up_at)
        try:
            listing = self._transport.request(call)
            self._pending.held = None
            self._is_done = settled(listing.json(), saved["name"], saved["seq"]) is not None
            self._result = {**saved, "durable": self._is_done}
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is self._pending.held:
                # No word about the checkpoint: the caller's time is over.
                return
            self._is_done, self._error = True, error


class AsyncCheckpointFuture(AsyncFuture[SavedCheckpoint]):
    """As `CheckpointFuture`: `await` it."""

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
            await self._look(self._saved, give_up_at)

    async def _look(self, saved: SavedCheckpoint, give_up_at: float | None) -> None:
        call = self._pending.patient(list_call(saved["job"]), give_up_at)
        try:
            listing = (await self._transport.request(call)).json()
            self._pending.held = None
            self._is_done = settled(listing, saved["name"], saved["seq"]) is not None
            self._result = {**saved, "durable": self._is_done}
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is self._pending.held:
                return
            self._is_done, self._error = True, error
