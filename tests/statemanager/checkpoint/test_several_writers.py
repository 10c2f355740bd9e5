"""The nodes that hold a checkpoint's versions write its files together."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from plexrl.errors import PermissionDeniedError
from plexrl.statemanager.checkpoint.format.plan import PlannedFile, PlannedTensor
from plexrl.statemanager.checkpoint.format.tensors import HeldBox, WholeTensor
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.statemanager.checkpoint.requests import CancelCheckpoint, CheckpointState
from plexrl.statemanager.checkpoint.write.division import divide
from plexrl.statemanager.layout.boxes import Box
from plexrl.statemanager.layout.keys import StateKey, StatePart
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.transfer.transport.tcp.client import TcpConnection
from tests.statemanager.checkpoint.test_checkpoint_daemon import (
    DEPLOYMENT,
    finished,
    snapshot,
    status,
    write,
)
from tests.statemanager.conftest import MIB, Daemon, MakeShard, Shard, StartDaemon, wait_until

NODES = 3
NAMES = tuple(f"w{index}" for index in range(6))
ELEMENTS = MIB // 4
"""Of each tensor on each node: 1 MiB."""
WRITERS = ("", "tcp://1", "tcp://2")


def file_of(index: int, sizes: list[tuple[int, int]]) -> PlannedFile:
    """One of tensors of so many rows, each at one reader."""
    tensors = [
        WholeTensor(
            key=StateKey(part=StatePart.PARAMETER, name=f"t{index}.{number}"),
            dtype="F32",
            shape=(count,),
            pieces=(HeldBox(reader=reader, box=Box(offset=(0,), shape=(count,)), data_offset=0),),
        )
        for number, (reader, count) in enumerate(sizes)
    ]
    planned = tuple(PlannedTensor(source=tensor, dtype="F32") for tensor in tensors)
    return PlannedFile(path=f"model-{index:02d}.safetensors", tensors=planned)


@given(
    sizes=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4000)), min_size=1, max_size=4),
        max_size=12,
    ),
    count=st.integers(1, 3),
)
def test_each_file_has_one_writer_and_no_writer_much_more_than_its_part(
    sizes: list[list[tuple[int, int]]], count: int
) -> None:
    files = [file_of(index, each) for index, each in enumerate(sizes)]
    parts = divide(files, WRITERS, WRITERS[:count])
    assert len(parts) == count
    assert sorted(file.path for part in parts for file in part) == [file.path for file in files]
    assert all(part == sorted(part, key=files.index) for part in parts)
    equal = sum(file.nbytes for file in files) / count
    largest = max((file.nbytes for file in files), default=0)
    assert all(sum(file.nbytes for file in part) <= equal + largest for part in parts)


def test_a_node_writes_what_it_holds() -> None:
    files = [file_of(index, [(index % 3, 1000)]) for index in range(9)]
    parts = divide(files, WRITERS, WRITERS)
    for number, part in enumerate(parts):
        assert [file.tensors[0].source.pieces[0].reader for file in part] == [number] * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def start_nodes(
    start_daemon: StartDaemon, folder: Path, count: int = NODES, **changes: object
) -> list[Daemon]:
    fields = {"checkpoint_url": str(folder), "serve_tcp": "127.0.0.1:0", **changes}
    return [start_daemon(**fields) for _ in range(count)]


def shards_of(make_shard: MakeShard, daemons: list[Daemon]) -> list[Shard]:
    """A rank on each node, with version 1."""
    shards = [
        make_shard(daemon, rank=rank, world_size=len(daemons), elements=ELEMENTS, names=NAMES)
        for rank, daemon in enumerate(daemons)
    ]
    snapshot(shards, 1)
    return shards


def sources(daemons: list[Daemon]) -> tuple[str, ...]:
    """The first node is asked, the others are on other machines."""
    return (daemons[0].config.listen, *(daemon.tcp for daemon in daemons[1:]))


def check_contents(folder: Path, shards: list[Shard]) -> None:
    """Every tensor is whole, and the manifest fits."""
    place = place_at(str(folder / "job" / "one"))
    record = place.read_record()
    assert {tensor.file for tensor in record.tensors} == {file.path for file in record.files}
    found: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
    for file in record.files:
        path = folder / "job" / "one" / file.path
        assert path.stat().st_size == file.nbytes
        found |= {name: value.view(np.uint8) for name, value in load_file(path).items()}
    for index, piece in enumerate(shards[0].slices):
        parts = [
            shard.version(10 + rank)[index * ELEMENTS * 4 : (index + 1) * ELEMENTS * 4]
            for rank, shard in enumerate(shards)
        ]
        assert np.array_equal(found[piece.key.name], np.concatenate(parts)), piece.key


def test_every_node_writes_a_part_of_one_checkpoint(
    start_daemon: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemons = start_nodes(start_daemon, folder)
    shards = shards_of(make_shard, daemons)
    write(shards[0].client, "one", 1, sources=sources(daemons), shard_bytes_max=NODES * MIB)
    report = finished(shards[0].client, "one")
    assert report["state"] == CheckpointState.DURABLE
    assert report["bytes_done"] == report["bytes_total"]
    check_contents(folder, shards)
    logs = [daemon.terminate() for daemon in daemons]
    assert "files of checkpoint" not in logs[0]
    assert all("4 files of checkpoint" in log for log in logs[1:]), "of twelve"


def test_the_asked_node_writes_what_others_cannot(
    start_daemon: StartDaemon, make_shard: MakeShard, folder: Path, tmp_path: Path
) -> None:
    [asked] = start_nodes(start_daemon, folder, 1)
    [other] = start_nodes(start_daemon, tmp_path / "folder-of-its-own", 1)
    daemons = [asked, other]
    shards = shards_of(make_shard, daemons)
    write(shards[0].client, "one", 1, sources=sources(daemons), shard_bytes_max=2 * MIB)
    report = finished(shards[0].client, "one")
    assert report["state"] == CheckpointState.DURABLE
    assert report["bytes_done"] == report["bytes_total"]
    check_contents(folder, shards)
    assert "is a folder that nodes do not share" in asked.terminate()


def test_what_is_cancelled_is_written_nowhere_any_more(
    start_daemon: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemons = start_nodes(start_daemon, folder, checkpoint_bytes_per_s=MIB)
    shards = shards_of(make_shard, daemons)
    client = shards[0].client
    write(client, "one", 1, sources=sources(daemons), shard_bytes_max=NODES * MIB)
    wait_until(lambda: status(client, "one")["bytes_done"] > 2 * MIB)
    client.request(CancelCheckpoint(deployment=DEPLOYMENT, name="one"))
    assert list((folder / "job").iterdir()) == []
    # The versions are held no longer, so they can be replaced.
    for daemon in daemons:
        daemon.terminate()
    assert list((folder / "job").iterdir()) == []


def test_a_worker_has_no_other_node_write(start_daemon: StartDaemon, folder: Path) -> None:
    [daemon] = start_nodes(start_daemon, folder, 1)
    ticket = daemon.worker_ticket(DEPLOYMENT, 0, 1)
    connection = TcpConnection(Network(is_trusted=True), daemon.tcp, ticket, 10.0)
    request = {
        "type": "write_files",
        "deployment": DEPLOYMENT,
        "seq": 1,
        "name": "one",
        "node": "node0",
        "sources": [],
        "stamps": [],
        "format": "both",
        "model_dtype": None,
        "model_type": "",
        "shard_bytes_max": MIB,
    }
    with pytest.raises(PermissionDeniedError, match="another node's"):
        connection.ask(request)
    connection.close()
