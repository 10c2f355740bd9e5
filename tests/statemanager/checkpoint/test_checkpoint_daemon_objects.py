"""Checkpoints that real daemons write to a real S3 server: over the network, killed, without an
answer."""

from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.numpy import load

from plexrl.errors import CheckpointNotFoundError
from plexrl.statemanager.checkpoint.announcement import RENEW_S, wait_until_written
from plexrl.statemanager.checkpoint.places.choice import place_at, root_at
from plexrl.statemanager.checkpoint.requests import CancelCheckpoint, CheckpointState
from plexrl.wire.messages.node_queries import CheckpointView
from tests.s3_server import S3Server, s3_server
from tests.statemanager.checkpoint.test_checkpoint_daemon import (
    ELEMENTS,
    finished,
    ranks,
    snapshot,
    status,
    weights_of,
    write,
)
from tests.statemanager.conftest import MIB, Daemon, MakeShard, StartDaemon, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment().items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def url(server: S3Server, request: pytest.FixtureRequest) -> str:
    return server.url(request.node.name.translate(str.maketrans("[]", "--")))


@pytest.fixture
def start(start_daemon: StartDaemon, url: str) -> StartDaemon:
    def start(**changes: Any) -> Daemon:
        return start_daemon(**{"checkpoint_url": url, **changes})

    return start


def weights(url: str, name: str) -> bytes:
    place = place_at(f"{url}/job/{name}")
    [file] = [each for each in place.files() if each.path == "model.safetensors"]
    found: bytes = load(place.read_range(file, 0, file.nbytes))["w"].tobytes()
    return found


def test_the_ranks_of_two_machines_make_one_checkpoint(
    start: StartDaemon, make_shard: MakeShard, url: str
) -> None:
    daemons = [start(serve_tcp="127.0.0.1:0", fabric="trusted") for _ in range(2)]
    shards = [
        make_shard(daemon, rank=rank, world_size=2, elements=ELEMENTS)
        for rank, daemon in enumerate(daemons)
    ]
    snapshot(shards, 3)
    assert daemons[1].tcp.startswith("tcp://")
    write(shards[0].client, "one", 3, sources=(daemons[0].config.listen, daemons[1].tcp))
    assert finished(shards[0].client, "one")["state"] == CheckpointState.DURABLE
    # Each node has written one of the two files.
    assert "1 files of checkpoint" in daemons[1].terminate()
    daemons[1].start()
    # Any node reports it.
    assert status(shards[1].client, "one")["state"] == CheckpointState.DURABLE
    assert weights(url, "one") == weights_of(shards, 3)


def test_a_cancelled_one_leaves_no_object_of_another_machine(
    start: StartDaemon, make_shard: MakeShard, url: str
) -> None:
    fields = {"serve_tcp": "127.0.0.1:0", "fabric": "trusted", "checkpoint_bytes_per_s": MIB}
    daemons = [start(**fields) for _ in range(2)]
    shards = [
        make_shard(daemon, rank=rank, world_size=2, elements=ELEMENTS)
        for rank, daemon in enumerate(daemons)
    ]
    snapshot(shards, 3)
    client = shards[0].client
    write(client, "one", 3, sources=(daemons[0].config.listen, daemons[1].tcp))
    wait_until(lambda: status(client, "one")["bytes_done"] > MIB)
    client.request(CancelCheckpoint(deployment="job/actor", name="one"))
    daemons[1].terminate()
    assert root_at(url).use(["job"], None) == (0, 0)


@pytest.mark.slow
def test_a_load_waits_for_a_daemon_that_lives_and_not_for_a_killed_one(
    start: StartDaemon, make_shard: MakeShard, url: str
) -> None:
    daemon = start(checkpoint_bytes_per_s=MIB // 2)
    (shard,) = ranks(make_shard, daemon, 1)
    snapshot([shard], 1)
    place = place_at(f"{url}/job/one")
    write(shard.client, "one", 1)
    wait_until_written(place, lost_s=4 * RENEW_S)
    assert place.read_record().seq == 1
    assert finished(shard.client, "one")["seconds"] > 4 * RENEW_S
    for name in ("one", "two"):
        write(shard.client, name, 1, overwrite=True)
    wait_until(lambda: status(shard.client, "one")["bytes_done"] > MIB)
    daemon.kill()
    with pytest.raises(CheckpointNotFoundError, match="node 'node0' was writing it"):
        wait_until_written(place_at(f"{url}/job/two"), lost_s=RENEW_S)
    wait_until_written(place, lost_s=RENEW_S)
    assert weights(url, "one") == weights_of([shard], 1)
    assert not place.announced()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(
    server: S3Server, start: StartDaemon, make_shard: MakeShard, url: str, seed: int
) -> None:
    daemon = start(checkpoint_bytes_per_s=30 * MIB)
    (shard,) = ranks(make_shard, daemon, 1)
    snapshot([shard], 1)
    write(shard.client, "one", 1)
    finished(shard.client, "one")
    old = weights(url, "one")
    snapshot([shard], 2)
    write(shard.client, "one", 2, overwrite=True)
    wait_until(lambda: status(shard.client, "one")["bytes_done"] >= seed * 2 * MIB)
    daemon.kill()
    new = weights_of([shard], 2)
    assert weights(url, "one") in (old, new)
    daemon.start()
    place = place_at(f"{url}/job/one")
    assert not place.announced()
    # The files of the killed attempt are gone, unless it was published.
    names = server.files(url.removeprefix("s3://plexrl/"))
    attempts = {name.split("/")[3] for name in names if not name.endswith("checkpoint.json")}
    attempts = {each for each in attempts if not each.startswith(".rclone")}
    assert attempts == {place.read_record().attempt}
    write(shard.client, "one", 2, overwrite=True)
    assert finished(shard.client, "one")["state"] == CheckpointState.DURABLE
    assert weights(url, "one") == new


def _code(report: CheckpointView) -> str:
    return "" if report["error"] is None else report["error"]["code"]


@pytest.mark.slow
def test_a_store_without_an_answer_delays_a_checkpoint_and_fails_none(
    server: S3Server, start: StartDaemon, make_shard: MakeShard, url: str
) -> None:
    daemon = start(checkpoint_bytes_per_s=4 * MIB)
    (shard,) = ranks(make_shard, daemon, 1)
    snapshot([shard], 1)
    write(shard.client, "one", 1)
    wait_until(lambda: status(shard.client, "one")["bytes_done"] > MIB)
    server.kill()
    wait_until(lambda: _code(status(shard.client, "one")) == "store_unavailable")
    report = status(shard.client, "one")
    assert report["state"] == CheckpointState.WRITING
    snapshot([shard], 2)
    server.start()
    assert finished(shard.client, "one")["state"] == CheckpointState.DURABLE
    expected = shard.version(10)[: ELEMENTS * 4].tobytes()
    assert weights(url, "one") == expected
    root_at(url).place("job", "one").delete("n")
    with pytest.raises(CheckpointNotFoundError):
        status(shard.client, "one")
