"""Checkpoints that a real daemon writes in the background, from versions of real clients."""

import random
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from plexrl.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    StateLostError,
    StorageFullError,
    from_wire,
)
from plexrl.statemanager.checkpoint.format.plan import CheckpointFormat
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.statemanager.checkpoint.requests import (
    CancelCheckpoint,
    CheckpointState,
    CheckpointStatus,
    WriteCheckpoint,
)
from plexrl.statemanager.checkpoint.restore import Checkpoint
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.wire.messages.node_queries import CheckpointView
from tests.statemanager.conftest import MIB, Daemon, MakeShard, Shard, StartDaemon, wait_until

DEPLOYMENT = "job/actor"
ELEMENTS = MIB


def release(daemon: Daemon) -> None:
    with closing(daemon.agent()) as agent:
        agent.release(DEPLOYMENT)


def usage_of(daemon: Daemon) -> dict[str, Any]:
    with closing(daemon.agent()) as agent:
        return agent.usage()


def write(client: StateManagerClient, name: str, seq: int, **fields: Any) -> CheckpointView:
    request = WriteCheckpoint(deployment=DEPLOYMENT, name=name, seq=seq, **fields)
    return msgspec.convert(client.request(request), CheckpointView)


def status(client: StateManagerClient, name: str) -> CheckpointView:
    request = CheckpointStatus(deployment=DEPLOYMENT, name=name)
    (report,) = client.request(request)["checkpoints"]
    return msgspec.convert(report, CheckpointView)


def finished(client: StateManagerClient, name: str) -> CheckpointView:
    wait_until(lambda: CheckpointState(status(client, name)["state"]).is_final)
    return status(client, name)


def weights(folder: Path, name: str) -> bytes:
    found: bytes = load_file(folder / "job" / name / "model.safetensors")["w"].tobytes()
    return found


def weights_of(shards: list[Shard], seq: int) -> bytes:
    return b"".join(
        shard.version(seq * 10 + rank)[: ELEMENTS * 4].tobytes()
        for rank, shard in enumerate(shards)
    )


def snapshot(shards: list[Shard], seq: int) -> None:
    for rank, shard in enumerate(shards):
        shard.fill(seq * 10 + rank)
        shard.snapshot(seq)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def start(start_daemon: StartDaemon, folder: Path) -> StartDaemon:
    def start(**changes: Any) -> Daemon:
        return start_daemon(**{"checkpoint_url": str(folder), **changes})

    return start


@pytest.fixture
def slow(start: StartDaemon) -> Daemon:
    """Writes a shard's 8 MiB in some seconds."""
    return start(checkpoint_bytes_per_s=2 * MIB, checkpoints_waiting_max=1)


def ranks(make_shard: MakeShard, daemon: Daemon, count: int) -> list[Shard]:
    return [
        make_shard(daemon, rank=rank, world_size=count, elements=ELEMENTS) for rank in range(count)
    ]


def test_what_was_pinned_is_written_whatever_training_does(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start(checkpoint_bytes_per_s=64 * MIB)
    shards = ranks(make_shard, daemon, 2)
    snapshot(shards, 1)
    report = write(shards[0].client, "one", 1)
    assert not CheckpointState(report["state"]).is_final
    # The next version replaces the one that is being written, and its name goes.
    snapshot(shards, 2)
    release(daemon)
    done = finished(shards[0].client, "one")
    assert done["state"] == CheckpointState.DURABLE, done
    assert done["bytes_done"] == done["bytes_total"] > 16 * MIB
    assert weights(folder, "one") == weights_of(shards, 1)
    usage = usage_of(daemon)
    assert usage["host_bytes"] == 0
    assert [entry["name"] for entry in usage["checkpoints"]] == ["one"]


def test_ranks_on_two_daemons_make_one_checkpoint(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemons = [start(), start()]
    shards = [
        make_shard(daemon, rank=rank, world_size=2, elements=ELEMENTS)
        for rank, daemon in enumerate(daemons)
    ]
    snapshot(shards, 3)
    with pytest.raises(StateLostError, match="rank 1"):
        write(shards[0].client, "one", 3)
    write(shards[0].client, "one", 3, sources=(daemons[1].config.listen,))
    assert finished(shards[0].client, "one")["state"] == CheckpointState.DURABLE
    assert weights(folder, "one") == weights_of(shards, 3)


def test_a_spilled_version_is_written_from_where_it_lies(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start(host_bytes=10 * MIB)
    shards = ranks(make_shard, daemon, 1)
    snapshot(shards, 1)
    other = make_shard(daemon, deployment="job/other", elements=ELEMENTS)
    other.fill(5)
    other.snapshot(1)
    tiers = {d: v["versions"][0]["tier"] for d, v in usage_of(daemon)["deployments"].items()}
    assert tiers == {DEPLOYMENT: "nvme", "job/other": "host"}
    write(shards[0].client, "one", 1)
    assert finished(shards[0].client, "one")["state"] == CheckpointState.DURABLE
    assert weights(folder, "one") == weights_of(shards, 1)


def test_asked_again_it_joins_and_then_finds_it_done(
    start: StartDaemon, make_shard: MakeShard
) -> None:
    daemon = start()
    (shard,) = ranks(make_shard, daemon, 1)
    snapshot([shard], 1)
    # It waits for space, so it cannot end before it is asked for again.
    daemon.limit_files(MIB)
    first = write(shard.client, "one", 1)
    again = write(shard.client, "one", 1)
    assert not CheckpointState(first["state"]).is_final
    assert not CheckpointState(again["state"]).is_final
    daemon.limit_files_no_more()
    assert finished(shard.client, "one")["state"] == CheckpointState.DURABLE
    assert write(shard.client, "one", 1)["state"] == CheckpointState.DURABLE
    assert len(usage_of(daemon)["checkpoints"]) == 1
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        write(shard.client, "one", 1, asked_by="another")
    snapshot([shard], 2)
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        write(shard.client, "one", 2)


def test_the_queue_is_bounded_and_a_cancelled_one_leaves_nothing(
    slow: Daemon, make_shard: MakeShard, folder: Path
) -> None:
    (shard,) = ranks(make_shard, slow, 1)
    snapshot([shard], 1)
    for name in ("one", "two"):
        write(shard.client, name, 1)
    with pytest.raises(OverloadedError, match="checkpoints_waiting_max"):
        write(shard.client, "three", 1)
    for name in ("one", "two"):
        shard.client.request(CancelCheckpoint(deployment=DEPLOYMENT, name=name))
        assert status(shard.client, name)["state"] == CheckpointState.CANCELLED
    assert list((folder / "job").iterdir()) == []
    release(slow)
    assert usage_of(slow)["host_bytes"] == 0


def test_pinned_versions_do_not_stand_in_the_way_of_offloads(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start(checkpoint_bytes_per_s=4 * MIB, host_bytes=20 * MIB, nvme_bytes=40 * MIB)
    (shard,) = ranks(make_shard, daemon, 1)
    other = make_shard(daemon, deployment="other/actor", elements=ELEMENTS)
    snapshot([shard], 1)
    write(shard.client, "one", 1)
    for seq in range(2, 6):
        contents = shard.fill(seq)
        shard.offload(seq, keep_seq=seq - 1)
        other.fill(100 + seq)
        other.offload(seq)
        shard.load(seq)
        assert np.array_equal(shard.contents, contents)
        other.load(seq)
    assert finished(shard.client, "one")["state"] == CheckpointState.DURABLE
    assert weights(folder, "one") == weights_of([shard], 1)


def test_a_killed_daemon_leaves_nothing_and_the_request_is_repeated(
    slow: Daemon, make_shard: MakeShard, folder: Path
) -> None:
    (shard,) = ranks(make_shard, slow, 1)
    snapshot([shard], 1)
    write(shard.client, "one", 1)
    wait_until(lambda: status(shard.client, "one")["bytes_done"] > MIB)
    slow.kill()
    assert [path.name for path in (folder / "job").iterdir()] == [".one.node0.part"]
    slow.start()
    with pytest.raises(CheckpointNotFoundError):
        status(shard.client, "one")
    assert list((folder / "job").iterdir()) == []
    write(shard.client, "one", 1)
    assert finished(shard.client, "one")["state"] == CheckpointState.DURABLE
    assert weights(folder, "one") == weights_of([shard], 1)


def test_a_checkpoint_stays_announced_when_an_earlier_one_of_its_name_ends(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start(checkpoint_bytes_per_s=2 * MIB)
    (shard,) = ranks(make_shard, daemon, 1)
    snapshot([shard], 1)
    for name in ("one", "two", "one"):
        write(shard.client, name, 1, overwrite=True, asked_by=name + random.randbytes(4).hex())
    wait_until(lambda: status(shard.client, "two")["bytes_done"] > 0)
    assert (folder / "job" / "one").exists()
    place = place_at(folder / "job" / "one")
    renewal = place.announced()["node0"]
    wait_until(lambda: place.announced()["node0"] != renewal)


def test_a_clean_exit_finishes_what_was_taken_in(
    slow: Daemon, make_shard: MakeShard, folder: Path
) -> None:
    (shard,) = ranks(make_shard, slow, 1)
    snapshot([shard], 1)
    write(shard.client, "one", 1)
    slow.terminate()
    assert weights(folder, "one") == weights_of([shard], 1)


def test_a_full_disk_delays_the_checkpoint_and_nothing_else(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start()
    three = ranks(make_shard, daemon, 3)
    snapshot(three, 2)
    # The weights make 12 MiB, and half of that in another dtype.
    daemon.limit_files(9 * MIB)
    write(three[0].client, "large", 2)
    wait_until(lambda: status(three[0].client, "large")["error"] is not None)
    waiting = status(three[0].client, "large")
    assert not CheckpointState(waiting["state"]).is_final
    assert waiting["error"] is not None
    error = from_wire(waiting["error"])
    assert error.code == "storage_full"
    assert error.details["file"] == "model.safetensors"
    write(three[0].client, "fits", 2, format=CheckpointFormat.HF, model_dtype="BF16")
    assert finished(three[0].client, "fits")["state"] == CheckpointState.DURABLE
    names = sorted(path.name for path in (folder / "job").iterdir())
    assert names == [".large.node0.part", "fits"], "a load waits for the one that is coming"
    assert three[0].load(2).bytes_moved == 2 * 4 * ELEMENTS
    expected = weights_of(three, 2)
    snapshot(three, 3)
    daemon.limit_files_no_more()
    assert finished(three[0].client, "large")["state"] == CheckpointState.DURABLE
    assert weights(folder, "large") == expected
    assert sorted(path.name for path in (folder / "job").iterdir()) == ["fits", "large"]


def waits(shard: Shard, name: str) -> bool:
    """Whether a checkpoint that is not over tells of an error."""
    return status(shard.client, name)["error"] is not None


def test_a_checkpoint_that_waits_for_room_can_be_given_up(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start(checkpoints_waiting_max=1)
    shards = ranks(make_shard, daemon, 1)
    snapshot(shards, 2)
    daemon.limit_files(MIB)
    for name in ("large", "another"):
        write(shards[0].client, name, 2)
        wait_until(partial(waits, shards[0], name))
    with pytest.raises(StorageFullError):
        write(shards[0].client, "third", 2)
    shards[0].client.request(CancelCheckpoint(deployment=DEPLOYMENT, name="another"))
    shards[0].client.request(CancelCheckpoint(deployment=DEPLOYMENT, name="large"))
    assert status(shards[0].client, "large")["state"] == CheckpointState.CANCELLED
    assert not list((folder / "job").iterdir())


def test_a_job_writes_no_other_jobs_checkpoints(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start()
    (shard,) = ranks(make_shard, daemon, 1)
    stranger = make_shard(daemon, deployment="evil/actor")
    snapshot([shard], 1)
    for request in (
        WriteCheckpoint(deployment=DEPLOYMENT, name="one", seq=1),
        CheckpointStatus(deployment=DEPLOYMENT),
        CancelCheckpoint(deployment=DEPLOYMENT, name="one"),
    ):
        with pytest.raises(PermissionDeniedError):
            stranger.client.request(request)
    for name in ("../up", ".hidden", "a/b", ""):
        with pytest.raises(InvalidRequestError):
            write(shard.client, name, 1)
    assert not folder.exists()


def test_old_checkpoints_go_and_kept_ones_stay(
    start: StartDaemon, make_shard: MakeShard, folder: Path
) -> None:
    daemon = start()
    (shard,) = ranks(make_shard, daemon, 1)
    policy = RetentionPolicy(keep_last=2, keep_every=4)
    for seq in range(1, 8):
        snapshot([shard], seq)
        write(shard.client, f"c{seq}", seq, keep=seq == 2, retention=policy)
        finished(shard.client, f"c{seq}")
        wait_until(lambda: not list((folder / "job").glob(".*")))
    expected = ["c2", "c4", "c6", "c7"]
    wait_until(lambda: sorted(p.name for p in (folder / "job").iterdir()) == expected)
    listed = shard.client.request(CheckpointStatus(deployment=DEPLOYMENT))["checkpoints"]
    assert [entry["name"] for entry in listed] == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(
    start: StartDaemon, make_shard: MakeShard, folder: Path, seed: int
) -> None:
    daemon = start(checkpoint_bytes_per_s=40 * MIB)
    (shard,) = ranks(make_shard, daemon, 1)
    snapshot([shard], 1)
    write(shard.client, "one", 1)
    finished(shard.client, "one")
    snapshot([shard], 2)
    write(shard.client, "one", 2, overwrite=True)
    # Past its end in some cases: eight megabytes take a fifth of a second.
    threading.Event().wait(random.Random(seed).uniform(0.0, 0.3))
    daemon.kill()
    daemon.start()
    with Checkpoint(folder / "job" / "one") as found:
        seq = found.record.seq
        found.verify(list(found.whole_parameters().values()))
    assert seq in (1, 2)
    assert weights(folder, "one") == weights_of([shard], seq)
    assert [path.name for path in (folder / "job").iterdir()] == ["one"]
