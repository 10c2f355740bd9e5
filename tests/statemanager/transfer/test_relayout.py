"""What ranks of one layout saved is loaded by ranks of another, bit for bit and each byte once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest

from plexrl.errors import InvalidRequestError, PermissionDeniedError, StateLostError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.reports import LoadReport
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.protocol.tickets import Role
from plexrl.statemanager.transfer.transport.tcp.client import TcpConnection
from plexrl.statemanager.transfer.transport.tcp.state import open_states
from plexrl.wire.messages import SaveRequest
from tests.statemanager import relayouts
from tests.statemanager.conftest import (
    ALL_PARTS,
    DEADLINE_S,
    MIB,
    NETWORK,
    Daemon,
    StartDaemon,
)
from tests.statemanager.relayouts import LAYOUTS, slices_of, state
from tests.statemanager.weight_sync import SERVING_TCP

NAME = "job/actor"


class Rank:
    """One rank with an arena of the model's state."""

    def __init__(
        self,
        daemon: Daemon,
        slices: Sequence[StateSlice],
        rank: int,
        world_size: int,
        token: int = 1,
    ) -> None:
        self.slices, self.token = slices, token
        self.arena = Arena(relayouts.arena_bytes(slices))
        self.client = StateManagerClient(
            daemon.config.listen,
            deployment=NAME,
            rank=rank,
            world_size=world_size,
            ticket=daemon.worker_ticket(NAME, rank, world_size),
            timeout_s=DEADLINE_S,
        )
        self.client.register(self.arena, slices, group="g", token=token)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.slices)

    def offload(self, version: int) -> None:
        memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        relayouts.fill(memory, self.slices, state(version))
        self.client.offload(
            SaveRequest(seq=version, keep_seq=version - 1, token=self.token),
            parts=ALL_PARTS,
            meta={"v": version},
        )

    def load(self, version: int, *, sources: Sequence[str] = ()) -> LoadReport:
        return self.client.load(seq=version, token=self.token, sources=sources)

    def holds(self, version: int) -> bool:
        memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)[: self.arena.nbytes]
        return relayouts.holds(memory, self.slices, state(version))

    def close(self) -> None:
        self.client.close()
        self.arena.close()


MakeRanks = Callable[..., list[Rank]]


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    """Makes the ranks of a layout, rank by rank on the given daemons in turn; closes them."""
    made: list[Rank] = []

    def make(
        daemons: Sequence[Daemon], layout: str, ways: int, *, gap: int = 0, token: int = 1
    ) -> list[Rank]:
        ranks = [
            Rank(
                daemons[rank % len(daemons)],
                slices_of(LAYOUTS[layout](rank, ways), gap),
                rank,
                ways,
                token,
            )
            for rank in range(ways)
        ]
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        rank.close()


def saved(ranks: Sequence[Rank], version: int = 1) -> None:
    """Saved by all ranks, which are gone afterwards."""
    for rank in ranks:
        rank.offload(version)
    for rank in ranks:
        rank.client.close()


@pytest.mark.parametrize("host_bytes", [256 * MIB, 1], ids=["host", "nvme"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("data", 4), ("data", 2)),
        (("fsdp", 4), ("tensor", 2)),
        (("tensor", 4), ("fsdp", 3)),
        (("pipeline", 4), ("pipeline", 2)),
        (("pipeline", 1), ("pipeline", 4)),
        (("expert", 4), ("expert", 2)),
        (("expert", 2), ("tensor", 4)),
        (("pipeline", 2), ("fsdp", 4)),
    ],
    ids=str,
)
def test_every_rank_of_another_layout_gets_its_own_bytes_once(
    start_daemon: StartDaemon,
    make_ranks: MakeRanks,
    before: tuple[str, int],
    after: tuple[str, int],
    host_bytes: int,
) -> None:
    daemon = start_daemon(host_bytes=host_bytes)
    saved(make_ranks([daemon], *before))
    for rank in make_ranks([daemon], *after, gap=64):
        report = rank.load(1)
        assert rank.holds(1)
        assert report.bytes_moved == rank.nbytes
        assert report.meta == {"v": 1}
        assert report.parts == {StatePart.PARAMETER, StatePart.OPTIMIZER}
        assert report.tier == ("host" if host_bytes > 1 else "nvme")


@pytest.mark.parametrize(
    ("way", "host_bytes"),
    # By path a neighbour would bring what it spilled to its host tier first.
    [("path", 256 * MIB), ("tcp", 256 * MIB), ("tcp", 1)],
    ids=["path-host", "tcp-host", "tcp-nvme"],
)
def test_pieces_on_other_nodes_are_fetched_from_there(
    start_daemon: StartDaemon, make_ranks: MakeRanks, way: str, host_bytes: int
) -> None:
    nodes = [start_daemon(**SERVING_TCP, host_bytes=host_bytes) for _ in range(3)]
    saved(make_ranks(nodes[:2], "fsdp", 4))
    addresses = [node.config.listen if way == "path" else node.tcp for node in nodes[:2]]
    for rank in make_ranks([nodes[2]], "tensor", 2):
        report = rank.load(1, sources=addresses)
        assert rank.holds(1)
        assert report.bytes_moved == rank.nbytes == sum(report.bytes_by_source.values())
        assert set(report.bytes_by_source) == set(addresses)


def test_pieces_that_do_not_make_a_whole_are_refused_by_name(
    start_daemon: StartDaemon, make_ranks: MakeRanks
) -> None:
    nodes = [start_daemon(), start_daemon()]
    saved(make_ranks(nodes, "fsdp", 4))
    [rank, _] = make_ranks(nodes[:1], "tensor", 2)
    with pytest.raises(StateLostError, match="save by 4 ranks with token 1 ranks 1, 3 are missing"):
        rank.load(1)
    with pytest.raises(StateLostError, match="not on this node"):
        rank.load(2)
    rank.load(1, sources=[nodes[1].config.listen])
    assert rank.holds(1)


def test_a_replica_stands_in_for_a_rank_that_is_lost(
    start_daemon: StartDaemon, make_ranks: MakeRanks
) -> None:
    nodes = [start_daemon(), start_daemon()]
    saved(make_ranks(nodes, "data", 4))
    [rank] = make_ranks(nodes[:1], "data", 1)
    rank.load(1)
    assert rank.holds(1)


def test_pieces_of_two_saves_of_one_seq_are_never_put_together(
    daemon: Daemon, make_ranks: MakeRanks
) -> None:
    first = make_ranks([daemon], "fsdp", 4, token=1)
    for rank in first[:2]:
        rank.offload(1)
    second = make_ranks([daemon], "fsdp", 4, token=2)
    for rank in second[2:]:
        rank.offload(1)
    [reader, _] = make_ranks([daemon], "tensor", 2, token=3)
    with pytest.raises(StateLostError, match=r"token 2 ranks 0, 1 .* token 1 ranks 2, 3"):
        reader.load(1)


def test_what_was_saved_before_stays_loadable_until_the_next_version_is_whole(
    daemon: Daemon, make_ranks: MakeRanks
) -> None:
    saved(make_ranks([daemon], "fsdp", 4))
    halves = make_ranks([daemon], "tensor", 2, token=2)
    for rank in halves:
        rank.load(1)
    # Only one of the two saves it again; the other is lost with all it had.
    halves[0].client.offload(SaveRequest(seq=1, keep_seq=1, token=2), parts=ALL_PARTS)
    for rank in make_ranks([daemon], "pipeline", 2, token=3):
        rank.load(1)
        assert rank.holds(1)
    again = make_ranks([daemon], "tensor", 2, token=4)
    for rank in again:
        rank.load(1)
        assert rank.holds(1)
    for version in (2, 3):
        for rank in again:
            rank.offload(version)
    with closing(daemon.agent()) as agent:
        versions = agent.usage()["deployments"][NAME]["versions"]
    assert {(v["seq"], v["world_size"]) for v in versions} == {(2, 2), (3, 2)}


def test_another_dtype_is_refused_unless_a_cast_is_asked_for(
    daemon: Daemon, make_ranks: MakeRanks
) -> None:
    saved(make_ranks([daemon], "fsdp", 2))
    half = Rank(daemon, slices_of(LAYOUTS["data"](0, 1), dtype="BF16"), 0, 1)
    try:
        with pytest.raises(InvalidRequestError, match="was saved as F32"):
            half.load(1)
        report = half.client.load(seq=1, token=1, cast=True)
        assert report.bytes_moved == half.nbytes
        memory = np.frombuffer(half.arena.buffer, dtype=np.uint8)
        for piece in half.slices:
            bits = memory[piece.arena_offset : piece.arena_offset + piece.nbytes].view(np.uint16)
            full = state(1)[piece.key].reshape(-1)
            is_nan = np.isnan(full.view(np.float32))
            rounded = ((full + 0x7FFF + ((full >> 16) & 1)) >> 16).astype(np.uint16)
            assert np.array_equal(bits[~is_nan], rounded[~is_nan])
    finally:
        half.close()


def test_a_worker_reads_no_other_deployment_over_tcp(
    start_daemon: StartDaemon, make_ranks: MakeRanks
) -> None:
    node = start_daemon(**SERVING_TCP)
    saved(make_ranks([node], "fsdp", 2))
    own = TcpConnection(NETWORK, node.tcp, node.worker_ticket(NAME), DEADLINE_S)
    other = TcpConnection(NETWORK, node.tcp, node.worker_ticket("job/critic"), DEADLINE_S)
    agent = TcpConnection(NETWORK, node.tcp, node.ticket(role=Role.AGENT), DEADLINE_S)
    try:
        assert len(open_states(own, NAME, 1)) == len(open_states(agent, NAME, 1)) == 2
        with pytest.raises(PermissionDeniedError, match="own deployment"):
            open_states(other, NAME, 1)
    finally:
        for state_of in (own, other, agent):
            state_of.close()
