"""Futures of operations, for blocking and for `async` controllers."""

import logging
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

from plexrl.client.calls.controller import acknowledge_call
from plexrl.client.calls.transport import AsyncTransport, Call, Transport
from plexrl.client.data.results import Decoder
from plexrl.client.display.handle_repr import handle_repr
from plexrl.errors import (
    ConnectionLostError,
    ControllerReplacedError,
    DeadlineExceededError,
    PlexRLError,
)

if TYPE_CHECKING:
    import httpx

    from plexrl.client.calls.controller import Controller

LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

POLL_S = 25.0
"""How long the router waits for the result before it answers a poll."""
LOG_PERIOD_S = 20.0
"""Time between two log messages about an operation that the caller waits for."""

View = dict[str, Any]


def poll_call(operation: str, wait_s: float) -> Call:
    """The request that waits for an operation's result."""
    return Call(
        method="GET",
        path=f"/v1/operations/{quote(operation, safe='')}",
        query={"wait_s": wait_s},
        read_timeout_s=wait_s + 60.0,
        is_poll=True,
    )


def wait_final(transport: Transport, operation: str) -> None:
    """Wait until an operation is final, whatever its outcome.

    Raises:
        ConnectionLostError: no cluster replies.
        ControllerReplacedError: another controller has attached the job.
    """
    while True:
        try:
            if transport.request(poll_call(operation, POLL_S)).status_code != 202:
                return
        except (ConnectionLostError, ControllerReplacedError):
            raise
        except PlexRLError:
            # The operation's own failure. The cluster keeps it until a controller reads it.
            return


async def wait_final_async(transport: AsyncTransport, operation: str) -> None:
    """As `wait_final`."""
    while True:
        try:
            response = await transport.request(poll_call(operation, POLL_S))
        except (ConnectionLostError, ControllerReplacedError):
            raise
        except PlexRLError:
            return
        if response.status_code != 202:
            return


def cancel_call(operation: str) -> Call:
    """The request that cancels an operation, or ends a generation early."""
    return Call(method="DELETE", path=f"/v1/operations/{quote(operation, safe='')}")


def waiting(controller: "Controller | None", operation: str) -> AbstractContextManager[None]:
    """`Controller.waiting`, if there is a controller."""
    return nullcontext() if controller is None else controller.waiting(operation)


class Pending:
    """The last view of one operation; shared by both kinds of future."""

    def __init__(self, view: View, decoder: Decoder) -> None:
        self.operation: str = view["operation"]
        self.view = view
        self.decoder = decoder
        self.unavailable: PlexRLError | None = None
        """Why the cluster cannot report the operation's state now."""
        self._logged_at = time.monotonic()

    def poll(self, wait_s: float, give_up_at: float | None = None) -> Call:
        """The request that waits for the result."""
        return self.limited(poll_call(self.operation, wait_s), give_up_at)

    def limited(self, call: Call, give_up_at: float | None) -> Call:
        """The same request; its retries end at `give_up_at`, and `unavailable` then says why."""
        return replace(call, give_up_at=give_up_at, on_unavailable=self._set_unavailable)

    def repr_of(self, future: object, error: Exception | None) -> str:
        """The future's repr: operation, kind, deployment and last known state."""
        kind, deployment = self.view.get("kind"), self.view.get("deployment")
        where = () if kind is None else (f"{kind} on {deployment!r}",)
        state = str(self.view["state"]) if error is None else f"failed: {type(error).__name__}"
        return handle_repr(future, self.operation, *where, state)

    def explain(self) -> str:
        """Why the operation was unfinished at the last poll."""
        if self.unavailable is not None:
            state = self.view["state"]
            return f"{state}; the cluster is unavailable for now: {self.unavailable}"
        return explanation_text(self.view)

    def log_wait(self) -> None:
        """Log from time to time why the caller still waits."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_PERIOD_S:
            self._logged_at = now
            LOG.info("still waiting: %s", self.explain())

    def _set_unavailable(self, error: PlexRLError) -> None:
        self.unavailable = error

    def take(self, response: "httpx.Response") -> tuple[bool, Any]:
        """(is finished, result) from the response to a poll."""
        self.unavailable = None
        if response.status_code == 202:
            self.view = response.json()
            return False, None
        from plexrl.wire.tensors import decode_body

        # A copy, so that the caller may write to the arrays.
        params, arrays = decode_body(bytearray(response.content))
        self.view = params["operation"]
        return True, self.decoder(params["result"], arrays)


class Future(Generic[ResultT]):
    """The result of an accepted operation. For one thread at a time."""

    def __init__(self, transport: Transport, view: View, decoder: Decoder) -> None:
        self._transport = transport
        self._pending = Pending(view, decoder)
        self._result: ResultT | None = None
        self._error: Exception | None = None
        self._is_done = False
        self._is_acknowledged = False

    def __repr__(self) -> str:
        return self._pending.repr_of(self, self._error)

    @property
    def operation(self) -> str:
        """The operation's id."""
        return self._pending.operation

    def result(self, timeout_s: float | None = None) -> ResultT:
        """Wait for the result, for at most `timeout_s` seconds if given.

        Raises:
            PlexRLError: the operation failed; this is its own error.
            DeadlineExceededError: unfinished after `timeout_s` seconds; call again later.
        """
        with waiting(self._transport.controller, self.operation):
            return self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> ResultT:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_done:
            self._poll(poll_s(deadline), give_up_at=deadline)
            if not self._is_done:
                self._pending.log_wait()
                if is_over(deadline):
                    raise not_finished(self.operation, timeout_s, self.explain())
        if self._error is not None:
            self._acknowledge(self._error)
            raise self._error
        return self._result  # type: ignore[return-value]

    def _acknowledge(self, error: Exception) -> None:
        """Acknowledge the operation's failure, which the caller is about to see."""
        controller = self._transport.controller
        if self._is_acknowledged or controller is None or not isinstance(error, PlexRLError):
            return
        try:
            answer = self._transport.request(acknowledge_call(self.operation)).json()
        except PlexRLError as second:
            # The operation's own error is raised; the next call reports the failure again.
            LOG.warning("the failure of %s was not acknowledged: %s", self.operation, second)
            return
        controller.acknowledged(answer)
        self._is_acknowledged = True

    def done(self) -> bool:
        """Whether the result, or the operation's error, is available."""
        if not self._is_done:
            self._poll(0.0, give_up_at=time.monotonic())
        return self._is_done

    def cancel(self) -> None:
        """Cancel the operation if it is pending; end a running generation with its tokens so far.

        Raises:
            ConflictError: the operation is running and cannot be ended.
        """
        self._pending.view = self._transport.request(cancel_call(self.operation)).json()

    def explain(self) -> str:
        """Why the operation was unfinished at the last poll, and until when by estimate."""
        return self._pending.explain()

    def status(self) -> View:
        """The cluster's view of the operation."""
        self.done()
        return dict(self._pending.view)

    def _poll(self, wait_s: float, give_up_at: float | None = None) -> None:
        try:
            response = self._transport.request(self._pending.poll(wait_s, give_up_at))
            self._is_done, self._result = self._pending.take(response)
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is self._pending.unavailable:
                # The caller's time is over; the operation may still succeed.
                return
            self._is_done, self._error = True, error


class AsyncFuture(Generic[ResultT]):
    """The result of an accepted operation, for `await`."""

    def __init__(self, transport: AsyncTransport, view: View, decoder: Decoder) -> None:
        self._transport = transport
        self._pending = Pending(view, decoder)
        self._result: ResultT | None = None
        self._error: PlexRLError | None = None
        self._is_done = False
        self._is_acknowledged = False

    def __repr__(self) -> str:
        return self._pending.repr_of(self, self._error)

    @property
    def operation(self) -> str:
        """The operation's id."""
        return self._pending.operation

    async def result(self, timeout_s: float | None = None) -> ResultT:
        """As `Future.result`."""
        with waiting(self._transport.controller, self.operation):
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not self._is_done:
                await self._poll(poll_s(deadline), give_up_at=deadline)
                if not self._is_done:
                    self._pending.log_wait()
                    if is_over(deadline):
                        raise not_finished(self.operation, timeout_s, self.explain())
            if self._error is not None:
                await self._acknowledge()
                raise self._error
        return self._result  # type: ignore[return-value]

    async def done(self) -> bool:
        """As `Future.done`."""
        if not self._is_done:
            await self._poll(0.0, give_up_at=time.monotonic())
        return self._is_done

    async def status(self) -> View:
        """As `Future.status`."""
        await self.done()
        return dict(self._pending.view)

    async def _poll(self, wait_s: float, give_up_at: float | None = None) -> None:
        try:
            response = await self._transport.request(self._pending.poll(wait_s, give_up_at))
            self._is_done, self._result = self._pending.take(response)
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is self._pending.unavailable:
                return
            self._is_done, self._error = True, error

    async def _acknowledge(self) -> None:
        """As `Future._acknowledge`."""
        controller = self._transport.controller
        if self._is_acknowledged or controller is None:
            return
        try:
            response = await self._transport.request(acknowledge_call(self.operation))
        except PlexRLError as second:
            LOG.warning("the failure of %s was not acknowledged: %s", self.operation, second)
            return
        controller.acknowledged(response.json())
        self._is_acknowledged = True

    async def cancel(self) -> None:
        """As `Future.cancel`."""
        self._pending.view = (await self._transport.request(cancel_call(self.operation))).json()

    def explain(self) -> str:
        """As `Future.explain`."""
        return self._pending.explain()

    def __await__(self) -> Generator[Any, None, ResultT]:
        return self.result().__await__()


def poll_s(deadline: float | None) -> float:
    """How long the next poll of a wait until `deadline` (monotonic clock) lasts."""
    return POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))


def is_over(deadline: float | None) -> bool:
    """Whether a wait until `deadline` has ended."""
    return deadline is not None and time.monotonic() >= deadline


def not_finished(operation: str, timeout_s: float | None, why: str) -> DeadlineExceededError:
    """The error of a wait that ended before the operation did."""
    return DeadlineExceededError(
        f"operation {operation!r} is unfinished after {timeout_s or 0.0:g} s: {why}"
    )


def explanation_text(view: View) -> str:
    """An operation's explanation in one line."""
    found = view.get("explanation")
    if not found:
        return str(view["state"])
    is_running = found["rule"] == "running"
    verb = "ends" if is_running else "starts"
    eta = "" if found["eta_s"] is None else f", {verb} in about {found['eta_s']:.1f} s"
    state = "" if is_running else f"{view['state']}: "
    return f"{state}{found['reason']}{eta}"
