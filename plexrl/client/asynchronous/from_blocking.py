"""Turns methods of the blocking client into coroutine methods.

Submissions run on the event loop. Rare requests run the blocking method in a thread, which each
call occupies. Signatures, types and docstrings are those of the blocking methods.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, get_origin, overload

from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.futures.checkpoints import AsyncCheckpointFuture, CheckpointFuture
from plexrl.client.futures.futures import AsyncFuture, Future
from plexrl.client.futures.generations import AsyncGenerateFuture, GenerateFuture

P = ParamSpec("P")
BlockingT = TypeVar("BlockingT", covariant=True)
ResultT = TypeVar("ResultT")
AsyncT = TypeVar("AsyncT")


ASYNC_FUTURES: dict[Any, Any] = {
    Future: AsyncFuture,
    CheckpointFuture: AsyncCheckpointFuture,
    GenerateFuture: AsyncGenerateFuture,
}
"""The class for `await` of each class of future."""


@overload
def submitting(
    method: Callable[Concatenate[Any, P], CheckpointFuture],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncCheckpointFuture]]:
    """For checkpoints."""


@overload
def submitting(
    method: Callable[Concatenate[Any, P], GenerateFuture],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncGenerateFuture]]:
    """For generations."""


@overload
def submitting(
    method: Callable[Concatenate[Any, P], Future[ResultT]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncFuture[ResultT]]]:
    """For all other operations."""


def submitting(method: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine method with the body of `method`, whose last act is to submit an operation."""

    @wraps(method)
    async def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # `self` is an `AsyncDeployment`, so the body's submission is a coroutine.
        return await method(self, *args, **kwargs)

    made = signature(method).return_annotation
    future = ASYNC_FUTURES[get_origin(made) or made]
    answer = future[get_args(made)] if get_args(made) else future
    run.__dict__["__signature__"] = signature(method).replace(return_annotation=answer)
    return run


class Wrapper(Protocol[BlockingT]):
    """An `async` object that wraps a blocking one."""

    @property
    def _sync(self) -> BlockingT: ...

    @property
    def _transport(self) -> AsyncTransport: ...


def in_thread(
    method: Callable[Concatenate[BlockingT, P], ResultT],
) -> Callable[Concatenate[Wrapper[BlockingT], P], Coroutine[Any, Any, ResultT]]:
    """A coroutine method that calls `method` of the wrapped object."""

    @wraps(method)
    async def run(self: Wrapper[BlockingT], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return await asyncio.to_thread(method, self._sync, *args, **kwargs)

    return run


def wrapped_in_thread(
    method: Callable[Concatenate[BlockingT, P], ResultT],
    wrapper: Callable[[AsyncTransport, ResultT], AsyncT],
) -> Callable[Concatenate[Wrapper[BlockingT], P], Coroutine[Any, Any, AsyncT]]:
    """As `in_thread`; the result of `method` is wrapped by the class `wrapper`."""

    @wraps(method)
    async def run(self: Wrapper[BlockingT], /, *args: P.args, **kwargs: P.kwargs) -> AsyncT:
        made = await asyncio.to_thread(method, self._sync, *args, **kwargs)
        return wrapper(self._transport, made)

    run.__dict__["__signature__"] = signature(method).replace(return_annotation=wrapper)
    return run
