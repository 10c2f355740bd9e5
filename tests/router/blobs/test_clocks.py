"""A machine whose clock is hours ahead of the clock of files and stores (libfaketime)."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.s3_server import S3Server

BEGIN = """
import sys, time
assert time.time() - float(sys.argv[2]) > 4 * 3600, "the clock is not ahead"
"""
ROUTER = """
import asyncio
from pathlib import Path
from plexrl.ids import BlobRef
from plexrl.router.blobs.directory import DirectoryBlobStore

store = DirectoryBlobStore(Path(sys.argv[1]))

async def write():
    await store.write(BlobRef("a.out"), b"x")
    await store.write(BlobRef("a.in"), b"x")

asyncio.run(write())
store.discard_results(older_than_s=3600)
print(store.payloads(older_than_s=3600))
print(bytes(asyncio.run(store.read(BlobRef("a.out")))))
store.discard_results(older_than_s=-60)
print(store.payloads(older_than_s=-60))
"""
WRITER = """
from plexrl.errors import StoreUnavailableError
from plexrl.storage.object_store import ObjectStore

try:
    ObjectStore(sys.argv[1]).write("key", b"x")
except StoreUnavailableError as error:
    print(error.message)
"""


@pytest.fixture
def ahead() -> dict[str, str]:
    """The environment of a process whose clock is five hours ahead of all files' and servers'."""
    found = find_spec("libfaketime")
    if found is None or found.origin is None:
        pytest.skip("libfaketime is missing: pip install libfaketime")
    (library,) = Path(found.origin).parent.rglob("libfaketime.so.1")
    fake = {"LD_PRELOAD": str(library), "FAKETIME": "+5h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {**os.environ, **fake, "NO_FAKE_STAT": "1"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    found = S3Server(tmp_path / "s3")
    found.start()
    yield found
    found.kill()


def run(program: str, where: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, where, str(time.time())],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_new_blobs_in_a_shared_directory_are_kept(tmp_path: Path, ahead: dict[str, str]) -> None:
    folder = tmp_path / "blobs"
    # Nothing is old, the result is there, and the payload is older than a time to come.
    assert run(ROUTER, str(folder), ahead) == ["[]", "b'x'", "['a.in']"]
    assert [path.name for path in folder.iterdir()] == ["a.in"]


def test_a_store_that_refuses_the_clock_is_named_with_the_clock(
    server: S3Server, ahead: dict[str, str]
) -> None:
    (line,) = run(WRITER, server.url("data"), {**ahead, **server.environment()})
    assert "could not write key" in line
    assert "set this machine's clock" in line
    assert server.files() == []
