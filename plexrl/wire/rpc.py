"""Calls in both directions over one framed connection (scheduler ↔ router, scheduler ↔ agent).

A `Peer` sends requests, answers the other side's requests, and transmits typed errors. Every call
has a deadline. When the connection ends, pending calls raise `ConnectionLostError` and `run`
returns.

A call is a header `{"method", "params"}`, with `"call"` if the caller expects an answer. An answer
is `{"answer", "result"}` or `{"answer", "error"}`. Any other frame ends the connection.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    NoAnswerError,
    PayloadTooLargeError,
    PlexRLError,
    from_wire,
)
from plexrl.wire.framing import read_frame, write_frame

LOG = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")
Handler = Callable[["Peer", dict[str, object]], Awaitable[Mapping[str, object] | None]]

IN_FLIGHT_MAX = 4096
"""Most requests of the other side that are handled at once; more wait in the socket."""


class Peer:
    """One end of a connection. `handlers` maps method names to coroutines that return plain values.

    If a handler raises `PlexRLError`, the answer is that error. Any other exception is a bug: it
    ends the connection, and `run` raises it.
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
        self._closes = False

    async def call(
        self, method: str, params: Mapping[str, object] | None = None, *, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """The other side's answer to `method`.

        Raises:
            PlexRLError: the other side's error.
            ConnectionLostError: the connection ended first.
            NoAnswerError: no answer within `timeout_s` seconds.
        """
        if self._closed:
            raise ConnectionLostError(f"cannot call {method!r}: the connection is closed; retry")
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
            raise NoAnswerError(f"{method!r} gave no answer in {timeout_s:g} s; retry") from error
        finally:
            self._pending.pop(call_id, None)

    async def notify(self, method: str, params: Mapping[str, object] | None = None) -> None:
        """Call `method` without an answer."""
        if self._closed:
            raise ConnectionLostError(f"cannot send {method!r}: the connection is closed; retry")
        await write_frame(self._writer, {"method": method, "params": dict(params or {})})

    async def ask(self, message: msgspec.Struct, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """The other side's answer to a message, whose type names the method. Raises as `call`."""
        fields = msgspec.structs.asdict(message)
        return await self.call(method_of(type(message)), fields, timeout_s=timeout_s)

    async def tell(self, message: msgspec.Struct) -> None:
        """Send a message without an answer."""
        await self.notify(method_of(type(message)), msgspec.structs.asdict(message))

    async def run(self) -> None:
        """Serve the connection until it ends; then cancel unfinished handlers."""
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while True:
                        # Calls and answers have no payload.
                        header, _ = await read_frame(self._reader, payload_bytes_max=0)
                        if "method" in header:
                            call_id = _call_id(header)
                            await self._slots.acquire()
                            task = tasks.create_task(self._serve(call_id, header))
                            task.add_done_callback(lambda _: self._slots.release())
                        else:
                            self._settle(header)
                except PlexRLError as error:
                    if not isinstance(error, ConnectionLostError):
                        LOG.warning("closing a connection: %s", error)
                    # No handler may outlive the connection that its answer needs.
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

    def close_after_answers(self) -> None:
        """Close the connection once the call that is being handled is answered."""
        self._closes = True

    def abort(self) -> None:
        """Close the connection and drop data that the other side has not received."""
        self._writer.transport.abort()
        self.close()

    async def _serve(self, call_id: int | None, header: dict[str, Any]) -> None:
        try:
            answer = {"answer": call_id, "result": await self._result(header)}
        except PlexRLError as error:
            answer = {"answer": call_id, "error": error.to_wire()}
        if call_id is None:
            return
        try:
            await write_frame(self._writer, answer)
        except ConnectionLostError:
            # The caller sees the same loss and retries.
            return
        except PayloadTooLargeError as error:
            refusal = {"answer": call_id, "error": error.to_wire()}
            with contextlib.suppress(ConnectionLostError):
                await write_frame(self._writer, refusal)
        if self._closes:
            self.close()

    async def _result(self, header: dict[str, Any]) -> Mapping[str, object]:
        method, params = header["method"], header.get("params")
        handler = self._handlers.get(method) if isinstance(method, str) else None
        if handler is None:
            raise InvalidRequestError(f"unknown method {method!r}")
        if not isinstance(params, dict):
            raise InvalidRequestError(f"the params of {method!r} must be a map")
        return await handler(self, params) or {}

    def _settle(self, header: dict[str, Any]) -> None:
        call_id, result, error = (header.get(key) for key in ("answer", "result", "error"))
        answer = error if "error" in header else result
        if not isinstance(call_id, int) or not isinstance(answer, dict):
            raise InvalidRequestError("a frame is neither a call nor an answer")
        future = self._pending.get(call_id)
        if future is None or future.done():
            # The caller has stopped waiting.
            return
        if "error" in header:
            future.set_exception(from_wire(answer))
        else:
            future.set_result(answer)


def method_of(kind: type[msgspec.Struct]) -> str:
    """The method by which messages of a type are sent: the name of the type in snake case."""
    return _in_snake_case(kind.__name__)


@functools.cache
def _in_snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def read_message(params: Mapping[str, object], kind: type[MessageT]) -> MessageT:
    """The message that a call of `Peer.ask` or `Peer.tell` carries.

    Raises:
        InvalidRequestError: it is malformed.
    """
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"malformed parameters: {error}") from error


def on_message(
    kind: type[MessageT], act: Callable[[MessageT], Awaitable[Mapping[str, object] | None]]
) -> Handler:
    """The handler of a message: `act` gets it in its type."""

    async def handle(_: Peer, params: dict[str, object]) -> Mapping[str, object] | None:
        return await act(read_message(params, kind))

    return handle


def on_command(
    read: Callable[[object], MessageT],
    act: Callable[[MessageT], Awaitable[Mapping[str, object] | None]],
) -> Handler:
    """The handler of calls that carry a command as `command`, which `read` types; it raises
    `msgspec.ValidationError` of a malformed one."""

    async def handle(_: Peer, params: dict[str, object]) -> Mapping[str, object] | None:
        try:
            command = read(params.get("command"))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"malformed command: {error}") from error
        return await act(command)

    return handle


def as_type(kind: type[MessageT]) -> Callable[[object], MessageT]:
    """Reads plain values as `kind`; raises `msgspec.ValidationError`."""
    return functools.partial(msgspec.convert, type=kind)


def _call_id(header: dict[str, Any]) -> int | None:
    call_id = header.get("call")
    if call_id is not None and not isinstance(call_id, int):
        raise InvalidRequestError(f"a call's id is {type(call_id).__name__}: it must be an integer")
    return call_id


class _ConnectionEnded(Exception):
    """Ends the task group of `Peer.run`."""
