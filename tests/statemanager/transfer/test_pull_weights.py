"""Weight sync through real daemons: every byte once, and from one version only."""

import threading

import numpy as np
import numpy.typing as npt
import pytest

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    OverloadedError,
    StateLostError,
)
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.daemon.handlers.caller import OPENED_MAX
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.channel import close_all
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.messages import Confirm, OpenPublished
from tests.statemanager.conftest import (
    DEADLINE_S,
    NETWORK,
    Daemon,
    MakeShard,
    StartDaemon,
    wait_until,
)

ROWS, COLUMNS = 10, 24
ELEMENTS = 1024


def weights(version: int) -> dict[str, npt.NDArray[np.float32]]:
    """A model's published tensors, a scalar buffer among them."""
    random = np.random.default_rng(version)
    return {
        "w": random.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        "scale": np.full((), version, dtype=np.float32),
    }


class Rank:
    """A rank of the trainer or the rollout, holding boxes of the model's tensors."""

    def __init__(
        self,
        daemon: Daemon,
        deployment: str,
        rank: int,
        boxes: list[tuple[str, tuple[slice, ...]]],
    ) -> None:
        self.windows = boxes
        slices = []
        end = 0
        for name, window in boxes:
            whole = weights(0)[name]
            piece = whole[window]
            slices.append(
                StateSlice(
                    key=StateKey(
                        part=StatePart.BUFFER if name == "scale" else StatePart.PARAMETER, name=name
                    ),
                    dtype="F32",
                    global_shape=whole.shape,
                    offset=tuple(part.start for part in window),
                    shape=piece.shape,
                    arena_offset=end,
                )
            )
            end += -(-piece.nbytes // 64) * 64
        self.slices = tuple(slices)
        self.arena = Arena(end)
        self.client = StateManagerClient(
            daemon.config.listen,
            deployment=deployment,
            rank=rank,
            world_size=2,
            ticket=daemon.worker_ticket(deployment, rank, 2),
            timeout_s=20.0,
            network=NETWORK,
        )
        self.client.register(self.arena, self.slices, group=deployment, token=1)

    def array(self, piece: StateSlice) -> npt.NDArray[np.float32]:
        memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        flat = memory[piece.arena_offset : piece.arena_offset + piece.nbytes]
        return flat.view(np.float32).reshape(piece.shape)

    def publish(self, version: int) -> None:
        for piece, (name, window) in zip(self.slices, self.windows, strict=True):
            self.array(piece)[...] = weights(version)[name][window]
        self.client.publish(seq=version, token=1)

    def holds(self, version: int) -> bool:
        return all(
            np.array_equal(self.array(piece), weights(version)[name][window])
            for piece, (name, window) in zip(self.slices, self.windows, strict=True)
        )

    def close(self) -> None:
        self.client.close()
        self.arena.close()


def box(rows: slice, columns: slice = slice(0, COLUMNS)) -> tuple[str, tuple[slice, ...]]:
    return ("w", (rows, columns))


def test_rollouts_pull_each_byte_of_their_layout_once_from_two_nodes(
    start_daemon: StartDaemon,
) -> None:
    nodes = [start_daemon(), start_daemon()]
    sources = [node.config.listen for node in nodes]
    # FSDP: each rank has half of the rows. The rollout is tensor parallel over columns.
    trainers = [
        Rank(nodes[0], "job/actor", 0, [box(slice(0, 5)), ("scale", ())]),
        Rank(nodes[1], "job/actor", 1, [box(slice(5, 10)), ("scale", ())]),
    ]
    rollouts = [
        Rank(nodes[0], "job/rollout", 0, [box(slice(0, 10), slice(0, 7)), ("scale", ())]),
        Rank(nodes[1], "job/rollout", 1, [box(slice(0, 10), slice(7, 24)), ("scale", ())]),
    ]
    for version in (1, 2, 3):
        for trainer in trainers:
            trainer.publish(version)
        for rollout in rollouts:
            report = rollout.client.pull(
                sources=sources, source="job/actor", seq=version, wants=rollout.slices
            )
            assert report.bytes_moved == sum(piece.nbytes for piece in rollout.slices)
            assert rollout.holds(version)
    for rank in (*trainers, *rollouts):
        rank.close()


def test_a_pull_after_a_restart_of_the_source_succeeds(start_daemon: StartDaemon) -> None:
    node = start_daemon()
    trainer = Rank(node, "job/actor", 0, [box(slice(0, 10))])
    rollout = Rank(node, "job/rollout", 0, [box(slice(3, 9))])
    trainer.publish(1)
    node.kill()
    node.start()
    rollout.client.pull(
        sources=[node.config.listen], source="job/actor", seq=1, wants=rollout.slices
    )
    assert rollout.holds(1)
    trainer.close()
    rollout.close()


def test_a_pull_of_a_shard_that_is_missing_names_the_key(start_daemon: StartDaemon) -> None:
    nodes = [start_daemon(), start_daemon()]
    trainers = [
        Rank(node, "job/actor", rank, [box(slice(5 * rank, 5 * rank + 5))])
        for rank, node in enumerate(nodes)
    ]
    rollout = Rank(nodes[0], "job/rollout", 0, [box(slice(0, 10))])
    for trainer in trainers:
        trainer.publish(1)
    with pytest.raises(StateLostError, match="no shard holds all of w"):
        rollout.client.pull(
            sources=[nodes[0].config.listen], source="job/actor", seq=1, wants=rollout.slices
        )
    with pytest.raises(StateLostError, match="has version 2 of 'job/actor' published"):
        rollout.client.pull(
            sources=[nodes[0].config.listen], source="job/actor", seq=2, wants=rollout.slices
        )
    for rank in (*trainers, rollout):
        rank.close()


def test_a_pull_needs_an_arena(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon, registered=False)
    with pytest.raises(InvalidRequestError, match="needs an arena: register one first"):
        shard.client.pull(sources=[], source="job/actor", seq=1, wants=shard.slices)


def test_only_the_last_published_versions_are_kept(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    for seq in (1, 2, 3):
        shard.client.publish(seq=seq, token=1)
    versions = shard.agent.usage()["deployments"]["job/actor"]["versions"]
    assert [(version["kind"], version["seq"]) for version in versions] == [
        ("published", 2),
        ("published", 3),
    ]


def test_publishing_leaves_what_can_be_loaded(daemon: Daemon, make_shard: MakeShard) -> None:
    shard = make_shard(daemon)
    expected = shard.fill(1)
    shard.snapshot(1)
    shard.client.publish(seq=2, token=1)
    shard.fill(2)
    shard.load(1)
    assert np.array_equal(shard.contents, expected)


def test_a_spilled_publication_is_pulled(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    daemon = start_daemon(host_bytes=600 << 10)
    trainer = make_shard(daemon)
    rollout = make_shard(daemon, deployment="job/rollout", group="h")
    expected = trainer.fill(1)[: trainer.slices[0].nbytes]
    trainer.client.publish(seq=1, token=1)
    trainer.offload(1)
    assert [path for path in daemon.nvme_files() if ".published." in path.name]
    rollout.client.pull(
        sources=[daemon.config.listen], source="job/actor", seq=1, wants=rollout.slices[:1]
    )
    assert np.array_equal(rollout.contents[: expected.size], expected)
    trainer.load(1)


def test_a_version_that_is_pulled_while_it_is_dropped_is_pulled_whole(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    """The trainer goes through versions as fast as it can; a rollout pulls what it is told of."""
    trainer = make_shard(daemon, elements=ELEMENTS * 256)
    rollout = make_shard(daemon, deployment="job/rollout", group="h", elements=ELEMENTS * 256)
    size = trainer.slices[0].nbytes
    published: list[int] = []
    ended = threading.Event()

    def train() -> None:
        seq = 0
        while not ended.is_set():
            seq += 1
            trainer.contents[:size] = seq % 251
            trainer.client.publish(seq=seq, token=1)
            published.append(seq)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_until(lambda: len(published) > 2)
        pulled = 0
        while pulled < 20:
            seq = published[-2]
            try:
                rollout.client.pull(
                    sources=[daemon.config.listen],
                    source="job/actor",
                    seq=seq,
                    wants=rollout.slices[:1],
                )
            except StateLostError:
                # Gone before it was opened: allowed, and the caller is told.
                continue
            assert (rollout.contents[:size] == seq % 251).all()
            pulled += 1
    finally:
        ended.set()
        thread.join()
    wait_until(lambda: len(daemon.host_files()) == 2)


def test_what_a_puller_reads_counts_until_it_is_done(daemon: Daemon, make_shard: MakeShard) -> None:
    """Dropped memory that somebody still maps is memory all the same."""
    trainer = make_shard(daemon)
    trainer.client.publish(seq=1, token=1)
    nbytes = trainer.slices[0].nbytes
    assert trainer.agent.usage()["host_bytes"] > nbytes
    with connect(daemon.config.listen, 20.0, daemon.worker_ticket("job/rollout")) as reader:
        _, fds = exchange(reader, OpenPublished(source="job/actor", seq=1))
        close_all(fds)
        trainer.agent.release("job/actor")
        # Without its header, which went with its name.
        assert trainer.agent.usage()["host_bytes"] == nbytes
    wait_until(lambda: trainer.agent.usage()["host_bytes"] == 0)
    assert not daemon.host_files()


def test_what_was_read_is_confirmed_by_the_daemon_that_lent_it_only(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    """One that was restarted meanwhile may have given the memory to others."""
    trainer = make_shard(daemon)
    trainer.client.publish(seq=1, token=1)
    with connect(daemon.config.listen, 20.0, daemon.worker_ticket("job/rollout")) as reader:
        _, fds = exchange(reader, OpenPublished(source="job/actor", seq=1))
        close_all(fds)
        assert exchange(reader, Confirm()) == ({}, [])
        daemon.kill()
        daemon.start()
        with pytest.raises((ConnectionLostError, OSError)):
            exchange(reader, Confirm())


def test_a_connection_holds_a_bounded_number_of_versions(
    daemon: Daemon, make_shard: MakeShard
) -> None:
    make_shard(daemon).client.publish(seq=1, token=1)
    request = OpenPublished(source="job/actor", seq=1)
    ticket = daemon.worker_ticket("job/rollout")
    with connect(daemon.config.listen, DEADLINE_S, ticket) as connection:
        for _ in range(OPENED_MAX):
            close_all(exchange(connection, request)[1])
        with pytest.raises(OverloadedError, match="close it and open another"):
            exchange(connection, request)
    with connect(daemon.config.listen, DEADLINE_S, ticket) as connection:
        close_all(exchange(connection, request)[1])
