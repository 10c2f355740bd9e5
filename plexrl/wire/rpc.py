"""Calls in both directions over one framed connection (scheduler ↔ router, scheduler ↔ agent).

A `Peer` sends requests, answers the other side's, and passes typed errors across. Every call has a
deadline. When the connection ends, pending calls raise `ConnectionLostError` and `run` returns.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from plexrl.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    InvalidRequestError,
    PlexRLError,
    from_wire,
)
from plexrl.wire.framing import read_frame, write_frame

Handler = Callable[["Peer", dict[str, Any]], Awaitable[dict[str, Any] | None]]

IN_FLIGHT_MAX = 4096
"""Requests of the other side that may be in work at once; more wait in the socket."""


class Peer:
    """One end of a connection. `handlers` maps method names to coroutines returning plain values.

    A handler that raises `PlexRLError` answers with that error; any other exception ends the
    connection and surfaces from `run`, because it is a bug of ours.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._closed = False

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """The other side's answer to `method`.

        Raises:
            PlexRLError: what the other side raised.
            ConnectionLostError: the connection ended first.
            DeadlineExceededError: no answer within `timeout_s` seconds.
        """
        if self._closed:
            raise ConnectionLostError(f"cannot call {method!r}: the connection is closed")
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                header = {"call": call_id, "method": method, "params": dict(params or {})}
                await write_frame(self._writer, header)
                answer: dict[str, Any] = await future
                return answer
        except TimeoutError as error:
            raise DeadlineExceededError(f"{method!r} gave no answer in {timeout_s:g} s") from error
        finally:
            self._pending.pop(call_id, None)

    async def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Tell the other side something; no answer is awaited."""
        await write_frame(self._writer, {"method": method, "params": dict(params or {})})

    async def run(self) -> None:
        """Serve the connection until it ends. Returns then; cancels unfinished handlers."""
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while True:
                        header, _ = await read_frame(self._reader)
                        if "method" in header:
                            await self._slots.acquire()
                            task = tasks.create_task(self._serve(header))
                            task.add_done_callback(lambda _: self._slots.release())
                        else:
                            self._settle(header)
                except ConnectionLostError:
                    # No task may outlive the connection that would carry its answer.
                    raise _ConnectionEnded from None
        except* _ConnectionEnded:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; pending calls raise `ConnectionLostError`."""
        self._closed = True
        self._writer.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLostError("the peer closed the connection"))

    def abort(self) -> None:
        """Close the connection without waiting for what the other side has not taken yet."""
        self._writer.transport.abort()
        self.close()

    async def _serve(self, header: dict[str, Any]) -> None:
        call_id = header.get("call")
        handler = self._handlers.get(header["method"])
        answer: dict[str, Any]
        try:
            if handler is None:
                raise InvalidRequestError(f"unknown method {header['method']!r}")
            answer = {"answer": call_id, "result": await handler(self, header["params"]) or {}}
        except PlexRLError as error:
            answer = {"answer": call_id, "error": error.to_wire()}
        if call_id is not None:
            try:
                await write_frame(self._writer, answer)
            except ConnectionLostError:
                # The caller sees the same loss and retries; there is nobody left to tell.
                return

    def _settle(self, header: dict[str, Any]) -> None:
        future = self._pending.get(header["answer"])
        if future is None or future.done():
            return
        if "error" in header:
            future.set_exception(from_wire(header["error"]))
        else:
            future.set_result(header["result"])


class _ConnectionEnded(Exception):
    """Ends the task group of `Peer.run`."""
