"""Blobs are whole or absent, small or large, and old results are deleted."""

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import xxhash

from plexrl.errors import (
    PayloadLostError,
    PayloadTooLargeError,
    StorageError,
    StorageFullError,
    UnknownOperationError,
)
from plexrl.ids import BlobRef
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.router.blobs.store import (
    INLINE_BYTES_MAX,
    PAYLOAD_SUFFIX,
    RECENT_BYTES_MAX,
    Upload,
    digested_ref,
)
from plexrl.router.job_files.metrics_log import MetricsFiles
from plexrl.router.job_files.record_store import JobKey
from tests.small_disk import small_disk


@pytest.mark.parametrize("size", [0, 10, INLINE_BYTES_MAX + 1])
def test_a_blob_is_unchanged_until_it_is_discarded(tmp_path: Path, size: int) -> None:
    store = DirectoryBlobStore(tmp_path)
    ref = BlobRef("job:1/../x.out")
    body = os.urandom(size)
    asyncio.run(store.write(ref, body))
    assert bytes(asyncio.run(store.read(ref))) == body
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]
    store.discard(ref)
    store.discard(ref)
    with pytest.raises(UnknownOperationError, match="no longer kept"):
        asyncio.run(store.read(ref))


@pytest.mark.parametrize("suffix", [".in", ".out"])
def test_the_longest_ids_are_valid_blob_names(tmp_path: Path, suffix: str) -> None:
    store = DirectoryBlobStore(tmp_path)
    refs = [BlobRef(f"a{':' * 198}{last}{suffix}") for last in "bc"]
    for ref in refs:
        asyncio.run(store.write(ref, ref.encode()))
    assert [bytes(asyncio.run(store.read(ref))) for ref in refs] == [r.encode() for r in refs]
    assert all(path.suffix == suffix for path in tmp_path.iterdir())
    for ref in refs:
        store.discard(ref)
    assert not list(tmp_path.iterdir())


def spoil(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"of the file")


def test_small_payloads_are_kept_in_memory_within_a_bound(tmp_path: Path) -> None:
    store = DirectoryBlobStore(tmp_path)
    refs = [BlobRef(f"{number}.in") for number in range(RECENT_BYTES_MAX // (1 << 20) + 2)]

    async def run() -> None:
        for ref in refs:
            upload = await store.receive(arriving(ref.encode().ljust(1 << 20)), 1 << 20)
            await store.publish(upload, ref)
        spoil(tmp_path)
        read = [bytes(await store.read(ref)) for ref in refs]
        assert read[:2] == [b"of the file"] * 2
        assert read[2:] == [ref.encode().ljust(1 << 20) for ref in refs[2:]]
        # A repeated run reads the file.
        assert bytes(await store.read(refs[-1])) == b"of the file"
        upload = await store.receive(arriving(b"x"), 1)
        await store.publish(upload, BlobRef("x.in"))
        store.discard(BlobRef("x.in"))
        with pytest.raises(PayloadLostError, match=r"payload .x\.in. is damaged or lost"):
            await store.read(BlobRef("x.in"))

    asyncio.run(run())


def test_only_old_results_are_deleted(tmp_path: Path) -> None:
    store = DirectoryBlobStore(tmp_path)
    for name in ("old.out", "old.in", "new.out", "killed.1.part"):
        asyncio.run(store.write(BlobRef(name), b"x"))
    long_ago = time.time() - 7200
    for name in ("old.out", "old.in", "killed.1.part"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    store.discard_results(older_than_s=3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.out", "old.in"]


def test_an_unwritable_store_raises_and_keeps_no_partial_file(tmp_path: Path) -> None:
    store = DirectoryBlobStore(tmp_path / "blobs")
    (tmp_path / "blobs").rmdir()
    with pytest.raises(StorageError, match="cannot be written"):
        asyncio.run(store.write(BlobRef("a"), b"x"))


async def arriving(body: bytes, chunk_bytes: int = 100_000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), chunk_bytes):
        await asyncio.sleep(0)
        yield body[start : start + chunk_bytes]


def named(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != ".part"]


@pytest.mark.parametrize("size", [0, 10, INLINE_BYTES_MAX, 3 * INLINE_BYTES_MAX + 17])
def test_an_upload_has_no_name_until_it_is_published(tmp_path: Path, size: int) -> None:
    store = DirectoryBlobStore(tmp_path)
    body = os.urandom(size)

    async def run() -> Upload:
        upload = await store.receive(arriving(body), size)
        assert bytes(upload.body) == body
        assert not named(tmp_path)
        await store.publish(upload, BlobRef("a.in"))
        upload.drop()
        assert bytes(await store.read(BlobRef("a.in"))) == body
        store.discard(BlobRef("a.in"))
        return upload

    upload = asyncio.run(run())
    # Data that is being sent to a worker must outlive the file.
    assert bytes(upload.body) == body
    assert not list(tmp_path.iterdir())
    again = asyncio.run(store.receive(arriving(body, 33_333), size))
    assert again.digest == upload.digest
    again.drop()


@pytest.mark.parametrize("size", [11, 2 * INLINE_BYTES_MAX + 11])
def test_a_body_over_the_limit_leaves_no_file(tmp_path: Path, size: int) -> None:
    store = DirectoryBlobStore(tmp_path)
    with pytest.raises(PayloadTooLargeError, match=f"over {size - 1} bytes"):
        asyncio.run(store.receive(arriving(bytes(size)), size - 1))
    assert not list(tmp_path.iterdir())


def test_a_body_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(INLINE_BYTES_MAX + 1)
        raise ConnectionError("the client is gone")

    store = DirectoryBlobStore(tmp_path)
    with pytest.raises(ConnectionError):
        asyncio.run(store.receive(broken(), 1 << 30))
    assert not list(tmp_path.iterdir())


def test_an_upload_that_cannot_be_written_raises(tmp_path: Path) -> None:
    store = DirectoryBlobStore(tmp_path / "blobs")
    (tmp_path / "blobs").rmdir()
    with pytest.raises(StorageError, match="cannot be written"):
        asyncio.run(store.receive(arriving(bytes(2 * INLINE_BYTES_MAX)), 1 << 30))


def test_an_upload_that_cannot_be_mapped_raises_and_leaves_no_file(tmp_path: Path) -> None:
    store = DirectoryBlobStore(tmp_path / "blobs")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def without_descriptors() -> AsyncIterator[bytes]:
        yield bytes(2 * INLINE_BYTES_MAX)
        # The upload's file is open. Its mapping needs more.
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        yield b"end"

    try:
        with pytest.raises(StorageError, match="Too many open files"):
            asyncio.run(store.receive(without_descriptors(), 1 << 30))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list((tmp_path / "blobs").iterdir()) == []


def test_a_full_disk_has_its_own_error_and_leaves_no_partial_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        store = DirectoryBlobStore(disk.path / "blobs")
        metrics = MetricsFiles(disk.path, row_bytes_max=1 << 20, job_bytes_max=1 << 30)
        metrics.append(JobKey("t", "j"), 1, {"loss": 1.0})
        disk.fill()

        async def store_it() -> None:
            await store.write(BlobRef("a.out"), b"x" * 5000)

        async def take_in(size: int) -> None:
            upload = await store.receive(arriving(b"x" * size), 1 << 30)
            await store.publish(upload, BlobRef("b.in"))

        def log_metrics() -> None:
            for step in range(2000):
                metrics.append(JobKey("t", "j"), step, {"loss": 1.0})

        attempts: tuple[Callable[[], None], ...] = (
            lambda: asyncio.run(store_it()),
            lambda: asyncio.run(take_in(5000)),
            lambda: asyncio.run(take_in(2 * INLINE_BYTES_MAX)),
            log_metrics,
        )
        for attempt in attempts:
            with pytest.raises(StorageFullError, match="free space there") as caught:
                attempt()
            assert caught.value.details["retry_after_s"]
        assert list((disk.path / "blobs").iterdir()) == []
        (rows,) = (disk.path / "metrics").rglob("*.jsonl")
        assert rows.read_bytes().endswith(b"}\n"), "half a line"
        disk.free()
        asyncio.run(store_it())
        asyncio.run(take_in(2 * INLINE_BYTES_MAX))
        metrics.append(JobKey("t", "j"), 5, {"loss": 1.0})


@pytest.mark.parametrize("size", [10, INLINE_BYTES_MAX + 1])
@pytest.mark.parametrize("damage", ["empty", "cut", "one bit"])
def test_a_damaged_blob_is_found_by_the_digest_in_its_name(
    tmp_path: Path, size: int, damage: str
) -> None:
    store = DirectoryBlobStore(tmp_path)
    body = os.urandom(size)
    ref = digested_ref("job:1.0", xxhash.xxh3_128_hexdigest(body), PAYLOAD_SUFFIX)
    asyncio.run(store.write(ref, body))
    assert bytes(asyncio.run(store.read(ref))) == body
    (path,) = tmp_path.iterdir()
    flipped = body[:-1] + bytes([body[-1] ^ 1])
    path.write_bytes({"empty": b"", "cut": body[:-1], "one bit": flipped}[damage])
    with pytest.raises(PayloadLostError, match=r"payload .* is damaged") as raised:
        asyncio.run(store.read(ref))
    assert raised.value.details["payload"] == ref


@pytest.mark.parametrize("damage", ["cut to nothing", "one bit"])
def test_the_bytes_of_a_large_payload_are_those_that_were_checked(
    tmp_path: Path, damage: str
) -> None:
    store = DirectoryBlobStore(tmp_path)
    body = os.urandom(INLINE_BYTES_MAX + 1)
    ref = digested_ref("job:1.0", xxhash.xxh3_128_hexdigest(body), PAYLOAD_SUFFIX)
    asyncio.run(store.write(ref, body))
    read = asyncio.run(store.read(ref))
    (path,) = tmp_path.iterdir()
    # The same file, which a map of it would show.
    with path.open("r+b") as file:
        if damage == "one bit":
            file.write(bytes([body[0] ^ 1]))
        else:
            file.truncate(0)
    assert bytes(read) == body
