"""Turns methods of the blocking client into coroutine methods that run in a thread.

For rare requests only, because each call occupies a thread. Signatures, types and docstrings are
those of the blocking methods.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from plexrl.client.calls.transport import AsyncTransport

P = ParamSpec("P")
BlockingT = TypeVar("BlockingT", covariant=True)
ResultT = TypeVar("ResultT")
AsyncT = TypeVar("AsyncT")


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
