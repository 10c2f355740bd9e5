"""Bytes on their way in are bounded, and come to nothing when they have arrived."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from plexrl.errors import ConnectionLostError, OverloadedError
from plexrl.router.blobs.upload_admission import Arrivals, steady


def test_tenants_are_bounded_by_themselves_and_together() -> None:
    arrivals = Arrivals(bytes_max=10, tenant_bytes_max=6)
    with ExitStack() as open_:
        open_.enter_context(arrivals.admit("a", 6))
        with pytest.raises(OverloadedError, match="tenant 'a'"), arrivals.admit("a", 1):
            pass
        open_.enter_context(arrivals.admit("b", 4))
        with pytest.raises(OverloadedError, match="this router") as caught, arrivals.admit("c", 1):
            pass
        assert float(str(caught.value.details["retry_after_s"])) > 0
        assert arrivals.bytes_arriving == 10
    assert arrivals.bytes_arriving == 0
    with arrivals.admit("a", 6):
        assert arrivals.bytes_arriving == 6


def test_one_beyond_the_bound_is_let_in_alone() -> None:
    arrivals = Arrivals(bytes_max=10, tenant_bytes_max=10)
    with arrivals.admit("a", 99), pytest.raises(OverloadedError), arrivals.admit("b", 1):
        pass
    assert arrivals.bytes_arriving == 0


def test_a_body_that_breaks_off_is_not_counted_on() -> None:
    arrivals = Arrivals(bytes_max=10, tenant_bytes_max=10)
    with pytest.raises(ConnectionError), arrivals.admit("a", 5):
        raise ConnectionError
    assert arrivals.bytes_arriving == 0


def test_a_body_that_stops_coming_is_given_up_and_one_that_comes_is_whole() -> None:
    async def coming(*, ends: bool) -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"
        if not ends:
            await asyncio.Event().wait()

    async def read(*, ends: bool, stall_s: float) -> list[bytes]:
        return [chunk async for chunk in steady(coming(ends=ends), stall_s)]

    assert asyncio.run(read(ends=True, stall_s=60.0)) == [b"one", b"two"]
    with pytest.raises(ConnectionLostError, match="send it again"):
        asyncio.run(read(ends=False, stall_s=0.5))


def test_a_body_that_drips_in_is_given_up_though_it_never_stops() -> None:
    async def dripping() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b"x"

    async def read() -> None:
        async for _ in steady(dripping(), 0.5):
            pass

    async def run() -> None:
        async with asyncio.timeout(30.0):
            await read()

    with pytest.raises(ConnectionLostError, match="more slowly"):
        asyncio.run(run())
