"""Futures of operations, for blocking and for `async` controllers."""

import logging
import time
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

from plexrl.client.calls.controller import acknowledge_call
from plexrl.client.calls.transport import AsyncTransport, Call, Steps, Transport
from plexrl.client.data.results import Decoder
from plexrl.client.display.handle_repr import handle_repr
from plexrl.errors import (
    ConnectionLostError,
    ControllerReplacedError,
    DeadlineExceededError,
    PlexRLError,
)
from plexrl.limits import check_numbers
from plexrl.wire.messages.views import OperationView

if TYPE_CHECKING:
    import httpx

    from plexrl.client.calls.controller import Controller

LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

POLL_S = 25.0
"""How long the router waits for the result before it answers a poll."""
LOG_PERIOD_S = 20.0
"""Time between two log messages about an operation that the caller waits for."""


def poll_call(operation: str, wait_s: float) -> Call:
    """The request that waits for an operation's result."""
    return Call(
        method="GET",
        path=f"/v1/operations/{quote(operation, safe='')}",
        query={"wait_s": wait_s},
        read_timeout_s=wait_s + 60.0,
        is_poll=True,
    )


def wait_final(operation: str) -> Steps[None]:
    """Wait until an operation is final, whatever its outcome.

    Raises:
        ConnectionLostError: no cluster replies.
        ControllerReplacedError: another controller has attached the job.
    """
    status = 202
    while status == 202:
        try:
            response = yield poll_call(operation, POLL_S)
        except (ConnectionLostError, ControllerReplacedError):
            raise
        except PlexRLError:
            # The operation's own failure. The cluster keeps it until a controller reads it.
            return
        status = response.status_code


class Pending(Generic[ResultT]):
    """An accepted operation, its last view, and the steps to its result; both kinds of future carry
    them out."""

    def __init__(
        self, view: OperationView, decoder: Decoder, controller: "Controller | None"
    ) -> None:
        self.operation: str = view["operation"]
        self.view = view
        self.decoder = decoder
        self.is_done = False
        self.error: PlexRLError | None = None
        self._result: ResultT | None = None
        self._controller = controller
        self._is_acknowledged = False
        self._unavailable: PlexRLError | None = None
        """Why the cluster cannot report the operation's state now."""
        self._logged_at = time.monotonic()

    def result(self, timeout_s: float | None) -> Steps[ResultT]:
        """Wait for the result."""
        controller = self._controller
        with nullcontext() if controller is None else controller.waiting(self.operation):
            check_numbers("result", {"timeout_s": timeout_s})
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not self.is_done:
                yield from self.poll(poll_s(deadline), deadline)
                if not self.is_done:
                    self._log_wait()
                    if is_over(deadline):
                        raise not_finished(self.operation, timeout_s, self.explain())
            if self.error is not None:
                yield from self._acknowledge()
                raise self.error
        return self._result  # type: ignore[return-value]  # it is done without an error

    def done(self) -> Steps[bool]:
        """Whether the result, or the operation's error, is available."""
        if not self.is_done:
            yield from self.poll(0.0, time.monotonic())
        return self.is_done

    def status(self) -> Steps[OperationView]:
        """The cluster's view of the operation."""
        yield from self.done()
        return {**self.view}

    def cancel(self) -> Steps[None]:
        """Cancel the operation, or end a generation early."""
        path = f"/v1/operations/{quote(self.operation, safe='')}"
        self.view = (yield Call(method="DELETE", path=path)).json()

    def poll(self, wait_s: float, give_up_at: float | None) -> Steps[None]:
        """Ask for the result once; the cluster answers within `wait_s` seconds."""
        response = yield from self.tried(poll_call(self.operation, wait_s), give_up_at)
        if response is None:
            return
        if response.status_code == 202:
            self.view = response.json()
            return
        from plexrl.wire.tensors import decode_body

        try:
            # A copy, so that the caller may write to the arrays.
            params, arrays = decode_body(bytearray(response.content))
            self.view = params["operation"]
            self._result = self.decoder(params["result"], arrays)
        except PlexRLError as error:
            self.error = error
        self.is_done = True

    def tried(self, call: Call, give_up_at: float | None) -> Steps["httpx.Response | None"]:
        """Send a request about the operation; its retries end at `give_up_at`. Absent: there is no
        response in that time, or the operation failed, which `error` says."""
        limited = replace(call, give_up_at=give_up_at, on_unavailable=self._set_unavailable)
        try:
            response: httpx.Response = yield limited
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is not self._unavailable:
                self.is_done, self.error = True, error
            # Otherwise the caller's time is over; the operation may still succeed.
            return None
        self._unavailable = None
        return response

    def repr_of(self, future: object) -> str:
        """The future's repr: operation, kind, deployment and last known state."""
        kind, deployment = self.view.get("kind"), self.view.get("deployment")
        where = () if kind is None else (f"{kind} on {deployment!r}",)
        error = self.error
        state = str(self.view["state"]) if error is None else f"failed: {type(error).__name__}"
        return handle_repr(future, self.operation, *where, state)

    def explain(self) -> str:
        """Why the operation was unfinished at the last poll."""
        if self._unavailable is not None:
            state = self.view["state"]
            return f"{state}; the cluster is unavailable for now: {self._unavailable}"
        return explanation_text(self.view)

    def _acknowledge(self) -> Steps[None]:
        """Acknowledge the operation's failure, which the caller is about to see."""
        if self._is_acknowledged or self._controller is None:
            return
        try:
            response = yield acknowledge_call(self.operation)
        except PlexRLError as second:
            # The operation's own error is raised; the next call reports the failure again.
            LOG.warning("the failure of %s was not acknowledged: %s", self.operation, second)
            return
        self._controller.acknowledged(response.json())
        self._is_acknowledged = True

    def _log_wait(self) -> None:
        """Log from time to time why the caller still waits."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_PERIOD_S:
            self._logged_at = now
            LOG.info("still waiting: %s", self.explain())

    def _set_unavailable(self, error: PlexRLError) -> None:
        self._unavailable = error


class Future(Generic[ResultT]):
    """The result of an accepted operation. For one thread at a time."""

    _steps: type[Pending[Any]] = Pending

    def __init__(self, transport: Transport, view: OperationView, decoder: Decoder) -> None:
        self._transport = transport
        self._pending: Pending[ResultT] = self._steps(view, decoder, transport.controller)

    def __repr__(self) -> str:
        return self._pending.repr_of(self)

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
        return self._transport.run(self._pending.result(timeout_s))

    def done(self) -> bool:
        """Whether the result, or the operation's error, is available."""
        return self._transport.run(self._pending.done())

    def cancel(self) -> None:
        """Cancel the operation if it is pending; end a running generation with its tokens so far.

        Raises:
            ConflictError: the operation is running and cannot be ended.
        """
        self._transport.run(self._pending.cancel())

    def explain(self) -> str:
        """Why the operation was unfinished at the last poll, and until when by estimate."""
        return self._pending.explain()

    def status(self) -> OperationView:
        """The cluster's view of the operation."""
        return self._transport.run(self._pending.status())


class AsyncFuture(Generic[ResultT]):
    """The result of an accepted operation, for `await`."""

    _steps: type[Pending[Any]] = Pending

    def __init__(self, transport: AsyncTransport, view: OperationView, decoder: Decoder) -> None:
        self._transport = transport
        self._pending: Pending[ResultT] = self._steps(view, decoder, transport.controller)

    def __repr__(self) -> str:
        return self._pending.repr_of(self)

    @property
    def operation(self) -> str:
        """The operation's id."""
        return self._pending.operation

    async def result(self, timeout_s: float | None = None) -> ResultT:
        """As `Future.result`."""
        return await self._transport.run(self._pending.result(timeout_s))

    async def done(self) -> bool:
        """As `Future.done`."""
        return await self._transport.run(self._pending.done())

    async def cancel(self) -> None:
        """As `Future.cancel`."""
        await self._transport.run(self._pending.cancel())

    def explain(self) -> str:
        """As `Future.explain`."""
        return self._pending.explain()

    async def status(self) -> OperationView:
        """As `Future.status`."""
        return await self._transport.run(self._pending.status())

    def __await__(self) -> Generator[Any, None, ResultT]:
        return self.result().__await__()


def poll_s(deadline: float | None) -> float:
    """Length in seconds of the next poll of a wait until `deadline` (monotonic clock)."""
    return POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))


def is_over(deadline: float | None) -> bool:
    """Whether a wait until `deadline` has ended."""
    return deadline is not None and time.monotonic() >= deadline


def not_finished(operation: str, timeout_s: float | None, why: str) -> DeadlineExceededError:
    """The error of a wait that ended before the operation did."""
    return DeadlineExceededError(
        f"operation {operation!r} is unfinished after {timeout_s or 0.0:g} s: {why}"
    )


def explanation_text(view: OperationView) -> str:
    """An operation's explanation in one line."""
    explanation = view.get("explanation")
    if not explanation:
        return str(view["state"])
    is_running = explanation["rule"] == "running"
    verb = "ends" if is_running else "starts"
    eta = "" if explanation["eta_s"] is None else f", {verb} in about {explanation['eta_s']:.1f} s"
    if explanation.get("eta_low_s") is not None:
        eta += f" ({explanation['eta_low_s']:.1f} to {explanation['eta_high_s']:.1f} s)"
    state = "" if is_running else f"{view['state']}: "
    return f"{state}{explanation['reason']}{eta}"
