"""Checkpoints in a real S3 server: whole or absent, read by ranges, in spite of its failures."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load

from plexrl.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptStateError,
    OperationCancelledError,
    StateLostError,
    StoreUnavailableError,
)
from plexrl.statemanager.checkpoint.folder import retain
from plexrl.statemanager.checkpoint.format.plan import SHARD_BYTES_MAX, CheckpointFormat
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.statemanager.checkpoint.places.objects import ObjectRoot
from plexrl.statemanager.checkpoint.restore import Checkpoint, read_record
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.layout.keys import StatePart
from plexrl.storage.object_store import ObjectStore
from plexrl.worker.state.checkpoint_files import fill_from_checkpoint, load_for
from tests.s3_server import BUCKET, S3Server, s3_server
from tests.statemanager.checkpoint import versions as v
from tests.statemanager.checkpoint.test_checkpoint_files import restored, write

RNG = np.random.default_rng(11)
OPTIMIZER = StatePart.OPTIMIZER
TENSORS: v.Tensors = {
    v.key("embed"): v.random_tensor(RNG, "F32", (3000, 1700)),
    v.key("norm"): v.random_tensor(RNG, "F32", (7,)),
    v.key("experts"): v.random_tensor(RNG, "BF16", (3, 5, 11)),
    v.key("embed/exp_avg", OPTIMIZER): v.random_tensor(RNG, "F32", (3000, 1700)),
    v.key("empty", OPTIMIZER): v.random_tensor(RNG, "F32", (0, 4)),
}


SMALL: v.Tensors = {
    v.key("embed"): v.random_tensor(RNG, "F32", (300, 170)),
    v.key("embed/exp_avg", OPTIMIZER): v.random_tensor(RNG, "F32", (300, 170)),
}
"""Without a file of several parts."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def url(server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server.url(request.node.name.strip("[]"))


def files(server: S3Server, url: str) -> list[str]:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    return [name.removeprefix(f"{prefix}/") for name in server.files(prefix)]


def begin(
    target: str, seq: int = 1, *, tensors: v.Tensors = SMALL, **changes: Any
) -> CheckpointProgress:
    """Announce and write, as the daemon does."""
    place = place_at(target)
    place.announce("n")
    try:
        return write(target, v.versions(tensors, 3, seq=seq), **changes)
    finally:
        place.announce_end("n")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_another_number_of_ranks_resumes_bit_for_bit(url: str, ranks: int) -> None:
    begin(f"{url}/job/c", tensors=TENSORS, shard_bytes_max=30 << 20)
    for cut in v.rows(TENSORS, ranks):
        arena, right, _ = restored(f"{url}/job/c", TENSORS, cut)
        assert arena == right


def test_it_has_the_bytes_of_a_checkpoint_in_a_directory(url: str, tmp_path: Path) -> None:
    begin(f"{url}/job/c", tensors=TENSORS, shard_bytes_max=1 << 20)
    write(tmp_path / "c", v.versions(TENSORS, 3), shard_bytes_max=1 << 20)
    place = place_at(f"{url}/job/c")
    found = {file.path: place.read_range(file, 0, file.nbytes) for file in place.files()}
    expected = {
        str(path.relative_to(tmp_path / "c")): path.read_bytes()
        for path in (tmp_path / "c").rglob("*")
        if path.is_file()
    }
    assert len(expected) >= 5
    assert found.keys() == expected.keys()
    del found["checkpoint.json"], expected["checkpoint.json"]
    assert found == expected
    assert load(found["model-00001-of-00002.safetensors"]).keys() == {"embed"}


def test_a_rank_reads_little_more_than_its_own_slices(url: str, server: S3Server) -> None:
    begin(f"{url}/job/c", tensors=TENSORS)
    cut = v.rows(TENSORS, 8)[3]
    slices = v.wanted(TENSORS, cut)
    own = sum(piece.nbytes for piece in slices)
    with Checkpoint(f"{url}/job/c") as found:
        found.verify(slices)
        checked = found.bytes_read
        # The second read does not use the store.
        server.suspend()
        try:
            found.fill(slices, lambda piece: memoryview(bytearray(piece.nbytes)))
        finally:
            server.resume()
    assert checked == found.bytes_read - checked
    assert own <= checked < 1.5 * own
    assert own < sum(data.nbytes for _, data in TENSORS.values()) / 7


def test_rollouts_read_the_parts_of_their_layout(url: str) -> None:
    begin(f"{url}/job/c", format=CheckpointFormat.HF)
    [piece] = [p for p in v.wanted(SMALL, v.rows(SMALL, 4)[2]) if p.key.name == "embed"]
    found = load_for(f"{url}/job/c", [piece])
    assert found[piece].numpy().tobytes() == v.part_of(SMALL, piece)
    with pytest.raises(CheckpointNotFoundError):
        load_for(f"{url}/job/never", [piece])


@pytest.mark.slow
def test_an_existing_checkpoint_is_replaced_only_on_request(server: S3Server, url: str) -> None:
    begin(f"{url}/job/c", seq=1)
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        begin(f"{url}/job/c", seq=2)
    assert read_record(f"{url}/job/c").seq == 1
    before = files(server, url)
    begin(f"{url}/job/c", seq=2, overwrite=True)
    record = read_record(f"{url}/job/c")
    assert record.seq == 2
    after = files(server, url)
    assert len(after) == len(before)
    assert all(record.attempt in name for name in after if not name.endswith("checkpoint.json"))


def test_a_failed_or_cancelled_checkpoint_leaves_nothing(server: S3Server, url: str) -> None:
    progress = CheckpointProgress()
    progress.cancel()
    with pytest.raises(OperationCancelledError):
        begin(f"{url}/job/c", progress=progress)
    readers = v.versions(SMALL, 3)
    place_at(f"{url}/job/c").announce("n")
    with pytest.raises(StateLostError):
        write(f"{url}/job/c", readers[:2])
    place_at(f"{url}/job/c").announce_end("n")
    assert files(server, url) == []


def test_a_load_waits_for_the_checkpoint_that_is_coming(url: str) -> None:
    place_at(f"{url}/job/c").announce("n")
    writer = threading.Timer(0.3, begin, [f"{url}/job/c"])
    writer.start()
    slices = v.wanted(SMALL, v.rows(SMALL, 1)[0])
    memory = {piece.key: bytearray(piece.nbytes) for piece in slices}
    fill_from_checkpoint(
        f"{url}/job/c", slices, lambda piece: memoryview(memory[piece.key]), lambda x: [x]
    )
    writer.join()
    assert all(memory[key] == data.tobytes() for key, (_, data) in SMALL.items())


def test_damage_is_found_and_named(server: S3Server, url: str) -> None:
    begin(f"{url}/job/c", format=CheckpointFormat.HF)
    [file] = [
        server.folder / BUCKET / name
        for name in server.files()
        if name.endswith("model.safetensors") and read_record(f"{url}/job/c").attempt in name
    ]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    slices = v.wanted(SMALL, v.rows(SMALL, 1)[0])
    weights = [piece for piece in slices if piece.key.part == StatePart.PARAMETER]
    with Checkpoint(f"{url}/job/c") as found, pytest.raises(CorruptStateError, match="checksum"):
        found.verify(weights)
    root = ObjectStore(url)
    root.delete([name for name in (each.key for each in root.find("")) if name.endswith(file.name)])
    with pytest.raises(CorruptStateError, match="missing"):
        Checkpoint(f"{url}/job/c")


def test_a_store_that_fails_while_it_is_written_publishes_nothing_and_a_retry_succeeds(
    server: S3Server, url: str
) -> None:
    begin(f"{url}/job/c", seq=1, tensors=TENSORS)
    place = place_at(f"{url}/job/c")
    place.announce("n")
    progress = CheckpointProgress()
    killed = threading.Event()

    class Killing(CheckpointProgress):
        def add(self, nbytes: int) -> None:
            super().add(nbytes)
            if self.bytes_done > self.bytes_total // 2 and not killed.is_set():
                killed.set()
                server.kill()

    progress = Killing()
    with pytest.raises(StoreUnavailableError):
        write(f"{url}/job/c", v.versions(TENSORS, 3, seq=2), progress=progress, overwrite=True)
    server.start()
    assert read_record(f"{url}/job/c").seq == 1
    arena, right, _ = restored(f"{url}/job/c", TENSORS, v.rows(TENSORS, 2)[1])
    assert arena == right
    write(f"{url}/job/c", v.versions(TENSORS, 3, seq=2), overwrite=True)
    place.announce_end("n")
    record = read_record(f"{url}/job/c")
    assert record.seq == 2
    kept = [name for name in files(server, url) if ".rclone" not in name]
    assert all(record.attempt in name for name in kept if not name.endswith("checkpoint.json"))


def test_files_of_a_killed_writer_go_when_its_node_starts_again_and_as_garbage(
    server: S3Server, url: str
) -> None:
    begin(f"{url}/job/whole")
    root = ObjectRoot(ObjectStore(url))
    for node in ("n", "m"):
        place = root.place("job", f"by-{node}")
        place.announce(node)
        draft = place.draft(node)
        draft.begin()
        draft.add("config.json", b"{}")
    with pytest.raises(CheckpointNotFoundError):
        place.read_record()
    assert [place.name for place, _ in root.complete("job")] == ["whole"]
    assert root.use(["job", "another"], None)[0] == 3
    assert root.use(["job"], ("job", "by-n"))[0] == 2
    [removed] = root.sweep("n")
    assert "by-n" in removed
    assert not root.place("job", "by-n").announced()
    assert root.place("job", "by-m").announced()
    assert not [name for name in files(server, url) if "by-n" in name]
    root.collect_garbage("job")
    assert [name for name in files(server, url) if name.startswith("job/by-m/")]
    # Files of an attempt that nobody has announced and that are old.
    old = ObjectStore(url)
    old.write("job/whole/0123456789abcdef/model.safetensors", b"x")
    old.write("job/whole/fedcba9876543210/model.safetensors", b"x")
    path = server.folder / BUCKET / url.removeprefix(f"s3://{BUCKET}/")
    os.utime(path / "job/whole/0123456789abcdef/model.safetensors", (1e9, 1e9))
    root.collect_garbage("job")
    kept = files(server, url)
    assert not [name for name in kept if "0123456789abcdef" in name]
    assert [name for name in kept if "fedcba9876543210" in name]
    assert restored(f"{url}/job/whole", SMALL, v.rows(SMALL, 1)[0])[0]


@pytest.mark.slow
def test_retention_and_deletion(server: S3Server, url: str) -> None:
    root = ObjectRoot(ObjectStore(url))
    for step in range(1, 5):
        begin(f"{url}/job/c{step}", seq=step, step=step, shard_bytes_max=SHARD_BYTES_MAX)
    gone = retain(root, "job", RetentionPolicy(keep_last=1, keep_every=2), "n", frozenset({"c3"}))
    assert gone == ["c1"]
    root.place("job", "c3").delete("n")
    with pytest.raises(FileNotFoundError):
        root.place("job", "c3").delete("n")
    assert [place.name for place, _ in root.complete("job")] == ["c2", "c4"]
    assert {name.split("/")[1] for name in files(server, url)} == {"c2", "c4"}
