"""Blobs in a real S3 server: routers on several machines, copies within a bound, outages."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from plexrl.errors import PayloadLostError, StoreUnavailableError, UnknownOperationError
from plexrl.ids import BlobRef
from plexrl.router.blobs.local_cache import LocalCache
from plexrl.router.blobs.objects import ObjectBlobStore
from plexrl.router.blobs.store import INLINE_BYTES_MAX
from plexrl.storage.object_store import ObjectStore
from tests.s3_server import S3Server, s3_server
from tests.slow_link import SlowLink, slow_link

SIZES = [0, 10, INLINE_BYTES_MAX + 1, 20 << 20]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def stores(
    server: S3Server,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[ObjectBlobStore, ObjectBlobStore]]:
    """The stores of two routers, which share only the server."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    url = server.url(request.node.name.strip("[]"))
    one, two = (
        ObjectBlobStore(ObjectStore(url), LocalCache(tmp_path / name, 20 << 20))
        for name in ("one", "two")
    )
    yield one, two
    one.close()
    two.close()


Stores = tuple[ObjectBlobStore, ObjectBlobStore]


async def arriving(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1 << 20):
        yield body[start : start + (1 << 20)]


async def until_gone(store: ObjectBlobStore, ref: BlobRef) -> None:
    """Wait for a deletion in the background; `store` must not have read the blob."""
    async with asyncio.timeout(30):
        while True:
            try:
                await store.read(ref)
            except UnknownOperationError:
                return
            store._cache.discard(ref)


@pytest.mark.parametrize("size", SIZES)
def test_a_result_of_one_router_is_read_by_another(stores: Stores, size: int) -> None:
    one, two = stores
    ref = BlobRef("job:1/../x.out")
    body = os.urandom(size)

    async def run() -> None:
        await one.write(ref, body[: size // 2], body[size // 2 :])
        found = await asyncio.gather(two.read(ref), two.read(ref), one.read(ref))
        assert [bytes(each) for each in found] == [body] * 3
        one.discard(ref)
        two._cache.discard(ref)
        await until_gone(two, ref)

    asyncio.run(run())


@pytest.mark.parametrize("size", SIZES)
def test_a_payload_is_read_by_the_router_that_executes_it(stores: Stores, size: int) -> None:
    one, two = stores
    ref = BlobRef("job/actor:1.in")
    body = os.urandom(size)

    async def run() -> None:
        upload = await one.receive(arriving(body), size)
        await one.publish(upload, ref)
        upload.drop()
        assert bytes(await two.read(ref)) == body
        assert bytes(upload.body) == body

    asyncio.run(run())


def test_what_a_router_has_stored_is_not_read_back(server: S3Server, stores: Stores) -> None:
    one, two = stores
    small, large = BlobRef("a.in"), BlobRef("b.out")

    async def run() -> None:
        upload = await one.receive(arriving(b"x"), 1)
        await one.publish(upload, small)
        await one.write(large, bytes(INLINE_BYTES_MAX + 1))
        await two.read(large)
        server.kill()
        try:
            for store in (one, two):
                assert memoryview(await store.read(large)).nbytes == INLINE_BYTES_MAX + 1
            assert await one.read(small) == b"x"
            with pytest.raises(StoreUnavailableError):
                await two.read(small)
            with pytest.raises(StoreUnavailableError):
                await one.write(BlobRef("c.out"), b"y")
            with pytest.raises(StoreUnavailableError):
                await one.write(BlobRef("d.out"), bytes(INLINE_BYTES_MAX + 1))
        finally:
            server.start()
        assert await two.read(small) == b"x"
        with pytest.raises(UnknownOperationError):
            await two.read(BlobRef("d.out"))

    asyncio.run(run())


def test_copies_stay_within_their_bound_and_maps_stay_valid(stores: Stores, tmp_path: Path) -> None:
    one, two = stores
    refs = [BlobRef(f"{number}.out") for number in range(4)]

    async def run() -> None:
        maps = []
        for number, ref in enumerate(refs):
            await one.write(ref, bytes([number]) * (8 << 20))
            maps.append(await two.read(ref))
        for folder in (tmp_path / "one", tmp_path / "two"):
            assert sum(path.stat().st_size for path in folder.iterdir()) == 16 << 20
        for number, each in enumerate(maps):
            assert each[0] == each[-1] == number
        assert bytes((await two.read(refs[0]))[:1]) == b"\0"

    asyncio.run(run())


def test_an_upload_over_a_slow_link_that_a_killed_server_interrupts_is_published_by_no_part(
    server: S3Server, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = stores[1]
    ref = BlobRef("a.in")
    body = os.urandom(110 << 20)

    async def run(slow: ObjectBlobStore, link: SlowLink) -> None:
        upload = await slow.receive(arriving(body), len(body))
        publishing = asyncio.create_task(slow.publish(upload, ref))
        await asyncio.to_thread(link.wait_until_sent, len(body) // 2)
        server.kill()
        try:
            with pytest.raises(StoreUnavailableError):
                await publishing
        finally:
            server.start()
        with pytest.raises(PayloadLostError):
            await two.read(ref)
        again = await slow.receive(arriving(body), len(body))
        await slow.publish(again, ref)
        assert bytes(await two.read(ref)) == body

    with slow_link(server.port, 100e6) as link:
        monkeypatch.setenv("AWS_ENDPOINT_URL", link.endpoint)
        slow = ObjectBlobStore(ObjectStore(two._store.url), LocalCache(tmp_path / "slow", 1 << 30))
        asyncio.run(run(slow, link))
        slow.close()


def test_only_old_results_are_deleted_and_old_payloads_are_found(stores: Stores) -> None:
    one, two = stores

    async def run() -> None:
        for name in ("a.out", "b:1.in", f"{'c:' * 99}.in"):
            await one.write(BlobRef(name), b"x")

    asyncio.run(run())
    one.discard_results(older_than_s=3600)
    assert one.payloads(older_than_s=3600) == []
    # The clock of the server is this machine's.
    assert one.payloads(older_than_s=-60) == [BlobRef("b:1.in")]
    assert bytes(asyncio.run(two.read(BlobRef("a.out")))) == b"x"
    two._cache.discard(BlobRef("a.out"))
    one.discard_results(older_than_s=-60)
    with pytest.raises(UnknownOperationError):
        asyncio.run(two.read(BlobRef("a.out")))
    assert bytes(asyncio.run(two.read(BlobRef("b:1.in")))) == b"x"
