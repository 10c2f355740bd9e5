"""Results that are yet to come."""

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
"""How long the router holds a poll."""
TELL_S = 20.0
"""Between two lines in the log about an operation that is waited for."""

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
    """Wait until nothing more comes of an operation, whatever has become of it.

    Raises:
        ConnectionLostError: no cluster answers.
        ControllerReplacedError: another controller has attached the job.
    """
    while True:
        try:
            if transport.request(poll_call(operation, POLL_S)).status_code != 202:
                return
        except (ConnectionLostError, ControllerReplacedError):
            raise
        except PlexRLError:
            # Its own failure, which is the cluster's to keep until somebody reads it.
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
    """The request that takes an operation back, or ends it early."""
    return Call(method="DELETE", path=f"/v1/operations/{quote(operation, safe='')}")


def waiting(controller: "Controller | None", operation: str) -> AbstractContextManager[None]:
    """As `Controller.waiting`, where there is a controller."""
    return nullcontext() if controller is None else controller.waiting(operation)


class Pending:
    """One operation's last known view; shared by both kinds of future."""

    def __init__(self, view: View, decoder: Decoder) -> None:
        self.operation: str = view["operation"]
        self.view = view
        self.decoder = decoder
        self.held: PlexRLError | None = None
        """Why the cluster does not tell now how the operation stands."""
        self._told_at = time.monotonic()

    def poll(self, wait_s: float, give_up_at: float | None = None) -> Call:
        """The request that waits for the result."""
        return self.patient(poll_call(self.operation, wait_s), give_up_at)

    def patient(self, call: Call, give_up_at: float | None) -> Call:
        """The same request, given up at `give_up_at` where the cluster holds; `held` says why."""
        return replace(call, give_up_at=give_up_at, on_held=self._hold)

    def repr_of(self, future: object, error: Exception | None) -> str:
        """The future's repr: operation, kind and deployment, and the state when last asked."""
        kind, deployment = self.view.get("kind"), self.view.get("deployment")
        where = () if kind is None else (f"{kind} on {deployment!r}",)
        state = str(self.view["state"]) if error is None else f"failed: {type(error).__name__}"
        return handle_repr(future, self.operation, *where, state)

    def explain(self) -> str:
        """Why the operation was not finished when last asked."""
        if self.held is not None:
            return f"{self.view['state']} when last seen: the cluster holds: {self.held}"
        return explanation_text(self.view)

    def tell(self) -> None:
        """Log now and then why whoever waits for the operation still does."""
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            LOG.info("still waiting: %s", self.explain())

    def _hold(self, error: PlexRLError) -> None:
        self.held = error

    def take(self, response: "httpx.Response") -> tuple[bool, Any]:
        """(is finished, result) of a poll's answer."""
        self.held = None
        if response.status_code == 202:
            self.view = response.json()
            return False, None
        from plexrl.wire.tensors import decode_body

        # A copy of its own, so that the caller may write to the arrays.
        params, arrays = decode_body(bytearray(response.content))
        self.view = params["operation"]
        return True, self.decoder(params["result"], arrays)


class Future(Generic[ResultT]):
    """The result of an operation that was accepted. For one thread at a time."""

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
        """Wait for the result, for at most `timeout_s` seconds where they are given.

        Raises:
            PlexRLError: the operation failed; the error is its own.
            DeadlineExceededError: it is not finished after `timeout_s` seconds; ask again later.
        """
        with waiting(self._transport.controller, self.operation):
            return self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> ResultT:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_done:
            self._poll(poll_s(deadline), give_up_at=deadline)
            if not self._is_done:
                self._pending.tell()
                if is_over(deadline):
                    raise not_finished(self.operation, timeout_s, self.explain())
        if self._error is not None:
            self._acknowledge(self._error)
            raise self._error
        return self._result  # type: ignore[return-value]

    def _acknowledge(self, error: Exception) -> None:
        """The caller is about to be told that the operation failed."""
        controller = self._transport.controller
        if self._is_acknowledged or controller is None or not isinstance(error, PlexRLError):
            return
        try:
            answer = self._transport.request(acknowledge_call(self.operation)).json()
        except PlexRLError as second:
            # The operation's own error is the one to show; the next call tells of it again.
            LOG.warning("the failure of %s is not taken note of: %s", self.operation, second)
            return
        controller.acknowledged(answer)
        self._is_acknowledged = True

    def done(self) -> bool:
        """Whether the result, or the operation's error, is there."""
        if not self._is_done:
            self._poll(0.0, give_up_at=time.monotonic())
        return self._is_done

    def cancel(self) -> None:
        """Take the operation back if it has not begun; end a running generation with what it has.

        Raises:
            ConflictError: it is running and cannot be ended.
        """
        self._pending.view = self._transport.request(cancel_call(self.operation)).json()

    def explain(self) -> str:
        """Why it was not finished when last asked, and until when by estimate."""
        return self._pending.explain()

    def status(self) -> View:
        """All that is known of the operation."""
        self.done()
        return dict(self._pending.view)

    def _poll(self, wait_s: float, give_up_at: float | None = None) -> None:
        try:
            response = self._transport.request(self._pending.poll(wait_s, give_up_at))
            self._is_done, self._result = self._pending.take(response)
        except ConnectionLostError:
            raise
        except PlexRLError as error:
            if error is self._pending.held:
                # No word about the operation: the caller's time is over.
                return
            self._is_done, self._error = True, error


class AsyncFuture(Generic[ResultT]):
    """The result of an operation that was accepted: `await` it."""

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
                    self._pending.tell()
                    if is_over(deadline):
                        raise not_finished(self.operation, timeout_s, self.explain())
            if self._error is not None:
                await self._acknowledge()
                raise self._error
        return self._result  # type: ignore[return-value]  # it is done

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
            if error is self._pending.held:
                # No word about the operation: the caller's time is over.
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
            LOG.warning("the failure of %s is not taken note of: %s", self.operation, second)
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
    """How long the next poll waits, for a wait that ends at `deadline` by the monotonic clock."""
    return POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))


def is_over(deadline: float | None) -> bool:
    """Whether a wait that ends at `deadline` has ended."""
    return deadline is not None and time.monotonic() >= deadline


def not_finished(operation: str, timeout_s: float | None, why: str) -> DeadlineExceededError:
    """What is raised by a wait that is over before the operation is."""
    return DeadlineExceededError(
        f"operation {operation!r} is not finished after {timeout_s or 0.0:g} s: {why}"
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
