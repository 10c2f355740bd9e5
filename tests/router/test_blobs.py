"""Blobs are whole or absent, small or large, and results do not pile up."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from plexrl.errors import StorageError, UnknownOperationError
from plexrl.ids import BlobRef
from plexrl.router.blobs import INLINE_BYTES_MAX, BlobStore


@pytest.mark.parametrize("size", [0, 10, INLINE_BYTES_MAX + 1])
def test_a_blob_comes_back_as_it_was_until_it_is_discarded(tmp_path: Path, size: int) -> None:
    store = BlobStore(tmp_path)
    ref = BlobRef("job:1/../x.out")
    body = os.urandom(size)
    asyncio.run(store.write(ref, body))
    assert asyncio.run(store.read(ref)) == body
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]
    store.discard(ref)
    store.discard(ref)
    with pytest.raises(UnknownOperationError, match="no longer kept"):
        asyncio.run(store.read(ref))


def test_old_results_go_and_payloads_and_new_results_stay(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    for name in ("old.out", "old.in", "new.out"):
        asyncio.run(store.write(BlobRef(name), b"x"))
    long_ago = time.time() - 7200
    for name in ("old.out", "old.in"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    store.discard_results(older_than_s=3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.out", "old.in"]


def test_a_store_that_cannot_be_written_says_so_and_keeps_nothing_half(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    (tmp_path / "blobs").rmdir()
    with pytest.raises(StorageError, match="free space there"):
        asyncio.run(store.write(BlobRef("a"), b"x"))
