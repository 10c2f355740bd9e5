"""Checkpoints and payloads in an object store, beside plain `fsspec` transfers of as many bytes.

    python -m benchmarks.object_store [--quick]

The store is rclone's S3 server on this machine, over a memory file system: what is compared is the
work of the client. A ratio of 1 is the speed of `put_file` and `get_file` of s3fs.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.report import report
from benchmarks.sizes import sized
from benchmarks.state.baselines import MIB, Work, in_turns, timed
from plexrl.ids import BlobRef
from plexrl.router.blobs.local_cache import LocalCache
from plexrl.router.blobs.objects import ObjectBlobStore
from plexrl.statemanager.checkpoint.format.plan import SHARD_BYTES_MAX, CheckpointFormat
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.statemanager.checkpoint.restore import Checkpoint
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec, write_checkpoint
from plexrl.storage.object_store import ObjectStore
from tests.s3_server import s3_server
from tests.statemanager.checkpoint import versions as v

STATE_BYTES = sized(192 * MIB, quick=24 * MIB)
TENSORS = 8
ROUNDS = sized(5, quick=1)


def main() -> None:
    """Print the table."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        server = stack.enter_context(s3_server(folder / "s3"))
        os.environ.update(server.environment())
        # The target of reads is memory too.
        tempfile.tempdir = str(folder)
        work = _Work(server.url("bench"), folder)
        stack.callback(work.close)
        found = in_turns(work.all(), ROUNDS)
    rows = []
    figures: dict[str, float] = {}
    for name, (ours, plain) in {
        "save a checkpoint": ("save", "put"),
        "store a payload": ("publish", "put"),
        "load a checkpoint (checked, then filled)": ("load", "get"),
        "read a payload at another router": ("read", "get"),
    }.items():
        rate = STATE_BYTES / found.best_s(ours) / 1e6
        baseline = STATE_BYTES / found.best_s(plain) / 1e6
        ratio = found.ratio(ours, plain)
        rows.append((name, f"{rate:.0f} MB/s", f"{plain} {baseline:.0f} MB/s", f"{ratio:.2f}"))
        figures |= {f"{ours}_mb_s": rate, f"{ours}_ratio": ratio, f"{plain}_mb_s": baseline}
    title = f"Object store, {STATE_BYTES >> 20} MiB, best of {ROUNDS}"
    report(title, ("transfer", "PlexRL", "fsspec", "ratio"), rows, figures)


class _Work:
    """The transfers, each repeatable."""

    def __init__(self, url: str, folder: Path) -> None:
        self._folder = folder
        self._store = ObjectStore(url)
        rng = np.random.default_rng(1)
        rows = STATE_BYTES // TENSORS // 4096
        self._tensors: v.Tensors = {
            v.key(f"w{number}"): v.random_tensor(rng, "F32", (rows, 1024))
            for number in range(TENSORS)
        }
        self._readers = v.versions(self._tensors, 1)
        # As for the plain transfers, the client is made once.
        self._place = place_at(f"{url}/job/one")
        self._plain = folder / "plain"
        self._plain.write_bytes(rng.bytes(STATE_BYTES))
        self._body = self._plain.read_bytes()
        self._blobs = [
            ObjectBlobStore(self._store, LocalCache(folder / name, 8 * STATE_BYTES))
            for name in ("here", "there")
        ]

    def all(self) -> dict[str, Work]:
        """By name; what reads follows what writes."""
        return {
            "put": lambda: timed(lambda: self._store.write_file("plain", self._plain)),
            "save": lambda: timed(self._save),
            "publish": lambda: timed(self._publish),
            "get": lambda: timed(self._get),
            "load": lambda: timed(self._load),
            "read": lambda: timed(self._read),
        }

    def close(self) -> None:
        for each in self._blobs:
            each.close()

    def _save(self) -> None:
        wanted = CheckpointSpec(
            target=self._place,
            node="n",
            format=CheckpointFormat.TRAINING,
            model_dtype=None,
            shard_bytes_max=SHARD_BYTES_MAX,
            overwrite=True,
        )
        write_checkpoint(wanted, self._readers, None, CheckpointProgress())

    def _load(self) -> None:
        slices = v.wanted(self._tensors, v.rows(self._tensors, 1)[0])
        memory = {piece.key: memoryview(bytearray(piece.nbytes)) for piece in slices}
        with Checkpoint(self._place) as checkpoint:
            checkpoint.verify(slices)
            checkpoint.fill(slices, lambda piece: memory[piece.key])

    def _publish(self) -> None:
        async def run() -> None:
            async def chunks() -> AsyncIterator[bytes]:
                for start in range(0, len(self._body), MIB):
                    yield self._body[start : start + MIB]

            upload = await self._blobs[0].receive(chunks(), len(self._body))
            await self._blobs[0].publish(upload, BlobRef("a.in"))

        asyncio.run(run())

    def _read(self) -> None:
        self._blobs[1]._cache.discard(BlobRef("a.in"))
        found = asyncio.run(self._blobs[1].read(BlobRef("a.in")))
        assert memoryview(found).nbytes == len(self._body)

    def _get(self) -> None:
        self._store.filesystem.get_file(self._store.path("plain"), str(self._folder / "got"))


if __name__ == "__main__":
    main()
