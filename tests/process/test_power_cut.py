"""What each writer of files has acknowledged is whole after a power cut, on a disk of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from plexrl.ids import BlobRef
from plexrl.process.folders.operator_key import operator_key, write_private
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.router.blobs.store import INLINE_BYTES_MAX
from plexrl.router.job_files.metrics_log import MetricsFiles
from plexrl.router.job_files.record_store import JobKey
from plexrl.statemanager.checkpoint.write import publish
from plexrl.statemanager.protocol.ticket_key import make_ticket_key
from plexrl.statemanager.store.disk_space import replace_file
from tests.hosts.loop_disk import LoopDisk, why_no_loop_disk

LARGE = bytes(range(256)) * (INLINE_BYTES_MAX // 256 + 1)


@pytest.fixture(scope="module")
def _loop_disks(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_loop_disk(tmp_path_factory.mktemp("loop")):
        pytest.skip(reason)


@pytest.fixture
def disk(_loop_disks: None, tmp_path: Path) -> Iterator[LoopDisk]:
    found = LoopDisk(tmp_path / "disk", tmp_path / "image", 32 << 20)
    yield found
    found.unmount()


async def arriving(body: bytes) -> AsyncIterator[bytes]:
    yield body


def write_result(folder: Path) -> None:
    asyncio.run(DirectoryBlobStore(folder / "blobs").write(BlobRef("a.out"), b"result"))


def receive_payload(folder: Path, body: bytes) -> None:
    async def run() -> None:
        store = DirectoryBlobStore(folder / "blobs")
        upload = await store.receive(arriving(body), len(body))
        await store.publish(upload, BlobRef("a.in"))

    asyncio.run(run())


def receive_many_payloads(folder: Path) -> None:
    async def run() -> None:
        store = DirectoryBlobStore(folder / "blobs")
        names = [BlobRef(f"{number}.in") for number in range(50)]
        await asyncio.gather(*(store.write(name, name.encode()) for name in names))

    asyncio.run(run())


def write_metrics(folder: Path) -> None:
    log = MetricsFiles(folder, row_bytes_max=1000, job_bytes_max=10_000)
    log.append(JobKey("tenant", "job"), 1, {"loss": 1.0})
    log.append(JobKey("tenant", "job"), 2, {"loss": 2.0})


def publish_checkpoint(folder: Path) -> None:
    target = folder / "checkpoints" / "job" / "one"
    publish.announce(target, "node")
    part = publish.part_of(target, "node")
    publish.begin(part)
    (part / "weights").write_bytes(b"weights")
    publish.publish(part, target, "node", overwrite=False)


def replace_key(folder: Path) -> None:
    operator_key(folder)
    write_private(folder / "operator.key", "another")


WRITERS: dict[str, Callable[[Path], object]] = {
    "result": write_result,
    "small payload": lambda folder: receive_payload(folder, b"payload"),
    "large payload": lambda folder: receive_payload(folder, LARGE),
    "many payloads": receive_many_payloads,
    "metrics": write_metrics,
    "checkpoint": publish_checkpoint,
    "operator's key": replace_key,
    "ticket key": lambda folder: make_ticket_key(folder / "node" / "state" / "ticket.key"),
    "small file of a StateManager": lambda folder: replace_file(folder / "known.json", b"{}"),
    "folder": lambda folder: make_private_folder(folder / "a" / "b" / "c"),
}


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder, without temporary ones."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != "lost+found"
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_writer_has_acknowledged_survives_a_power_cut(disk: LoopDisk, writer: str) -> None:
    disk.flush()
    WRITERS[writer](disk.folder)
    written = contents(disk.folder)
    assert written
    disk.cut()
    disk.mount()
    assert contents(disk.folder) == written


def test_a_cut_loses_what_was_not_flushed(disk: LoopDisk) -> None:
    part = disk.folder / "file.part"
    part.write_bytes(b"contents")
    part.rename(disk.folder / "file")
    # Makes the name durable, as another file's flush does on ext4.
    write_private(disk.folder / "other", "other")
    disk.cut()
    disk.mount()
    assert contents(disk.folder) == {"file": b"", "other": b"other"}
