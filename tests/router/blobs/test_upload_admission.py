"""The bytes that arrive at a time are bounded, and stalled bodies are abandoned."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from plexrl.errors import ConnectionLostError, OverloadedError
from plexrl.router.blobs.upload_admission import UploadAdmission, timed_chunks


def test_each_tenant_and_all_tenants_together_are_bounded() -> None:
    uploads = UploadAdmission(bytes_max=10, tenant_bytes_max=6)
    with ExitStack() as open_:
        open_.enter_context(uploads.admit("a", 6))
        with pytest.raises(OverloadedError, match="tenant 'a'"), uploads.admit("a", 1):
            pass
        open_.enter_context(uploads.admit("b", 4))
        with pytest.raises(OverloadedError, match="this router") as caught, uploads.admit("c", 1):
            pass
        assert float(str(caught.value.details["retry_after_s"])) > 0
        assert uploads.bytes_arriving == 10
    assert uploads.bytes_arriving == 0
    with uploads.admit("a", 6):
        assert uploads.bytes_arriving == 6


def test_a_body_over_the_bound_is_admitted_alone() -> None:
    uploads = UploadAdmission(bytes_max=10, tenant_bytes_max=10)
    with uploads.admit("a", 99), pytest.raises(OverloadedError), uploads.admit("b", 1):
        pass
    assert uploads.bytes_arriving == 0


def test_a_body_that_breaks_off_is_no_longer_counted() -> None:
    uploads = UploadAdmission(bytes_max=10, tenant_bytes_max=10)
    with pytest.raises(ConnectionError), uploads.admit("a", 5):
        raise ConnectionError
    assert uploads.bytes_arriving == 0


def test_a_stalled_body_is_abandoned_and_a_steady_one_is_whole() -> None:
    async def coming(*, ends: bool) -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"
        if not ends:
            await asyncio.Event().wait()

    async def read(*, ends: bool, stall_s: float) -> list[bytes]:
        return [chunk async for chunk in timed_chunks(coming(ends=ends), stall_s)]

    assert asyncio.run(read(ends=True, stall_s=60.0)) == [b"one", b"two"]
    with pytest.raises(ConnectionLostError, match="send it again"):
        asyncio.run(read(ends=False, stall_s=0.5))


def test_a_body_that_arrives_too_slowly_is_abandoned() -> None:
    async def dripping() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b"x"

    async def read() -> None:
        async for _ in timed_chunks(dripping(), 0.5):
            pass

    async def run() -> None:
        async with asyncio.timeout(30.0):
            await read()

    with pytest.raises(ConnectionLostError, match="more slowly"):
        asyncio.run(run())
