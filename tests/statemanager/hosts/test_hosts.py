"""StateManagers of hosts that share nothing but a network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plexrl.statemanager.protocol.network import TRUSTED
from tests.hosts.network import Network, hosts, why_impossible
from tests.statemanager.conftest import wait_until
from tests.statemanager.hosts.nodes import MIB, Node, Rank, start_nodes

MODEL = {"tensors": 4, "rows": 512, "columns": 512}
MODEL_BYTES = 4 * 512 * 512 * 4
FABRICS = pytest.mark.parametrize(
    "fabric", ["", pytest.param(TRUSTED, marks=pytest.mark.slow)], ids=["tls", "tcp"]
)
BOTH_FABRICS = pytest.mark.parametrize("fabric", ["", TRUSTED], ids=["tls", "tcp"])

LARGE = {"tensors": 32, "rows": 512, "columns": 1024}
LARGE_BYTES = 32 * 512 * 1024 * 4
SLOW_LINK = "160mbit"
"""So that a link can be cut in the middle of a transfer, which takes a few seconds."""
BREAK_S = 60.0
"""Enough for a broken link to be found, and for the rest of the transfer."""


@pytest.fixture(scope="session")
def why_skipped() -> str:
    return why_impossible()


@pytest.fixture
def network(why_skipped: str) -> Iterator[Network]:
    if why_skipped:
        pytest.skip(why_skipped)
    with hosts("a", "b", "c") as found:
        yield found


@FABRICS
def test_a_weight_sync_between_hosts_moves_each_needed_byte_once(
    network: Network, tmp_path: Path, fabric: str
) -> None:
    a, b, c = start_nodes(network.hosts, tmp_path / "authority", fabric=fabric)
    # The same path on every host: an address by path alone would reach another node's daemon.
    for rank, node in enumerate((a, b)):
        trainer = node.rank(deployment="job/actor", rank=rank, world_size=2, split=0, **MODEL)
        trainer.do("publish", seq=1)
    rollouts = [
        c.rank(deployment="job/rollout", rank=rank, world_size=2, split=1, **MODEL)
        for rank in range(2)
    ]
    before = c.received_bytes()
    for rollout in rollouts:
        report = rollout.do("pull", seq=1, sources=[a.address, b.address], source="job/actor")
        assert report["moved"] == report["wanted"] == MODEL_BYTES // 2
        assert report["by_source"] == {
            node.address.partition("#")[0]: MODEL_BYTES // 4 for node in (a, b)
        }
        assert rollout.do("check", seq=1)["holds"]
    # What the network interface saw, with headers and handshakes.
    assert MODEL_BYTES < c.received_bytes() - before < 1.1 * MODEL_BYTES


@FABRICS
def test_a_migration_between_hosts_brings_each_node_its_own_ranks_once(
    network: Network, tmp_path: Path, fabric: str
) -> None:
    a, b, c = start_nodes(network.hosts, tmp_path / "authority", fabric=fabric)
    for rank in range(4):
        part = {"deployment": "job/actor", "rank": rank, "world_size": 4, "split": 0}
        a.rank(**part, optimizer=True, **MODEL).do("save", seq=3)
    for node, ranks in ((b, [0, 1]), (c, [2, 3])):
        before = node.received_bytes()
        workers = [
            node.rank(
                deployment="job/actor", rank=rank, world_size=4, split=0, optimizer=True, **MODEL
            )
            for rank in ranks
        ]
        moved = workers[0].do("migrate", seq=3, sources=[a.address], ranks=ranks)["moved"]
        assert moved == MODEL_BYTES // 2
        assert MODEL_BYTES // 2 < node.received_bytes() - before < 1.1 * MODEL_BYTES // 2
        for worker in workers:
            worker.do("load", seq=3)
            assert worker.do("check", seq=3)["holds"]


def under_way(node: Node, before: int, nbytes: int) -> None:
    """Wait until a node has received so many bytes more than `before`."""
    wait_until(lambda: node.received_bytes() >= before + nbytes)


def publish(nodes: list[Node]) -> None:
    """A replica of version 1 on each node."""
    for node in nodes:
        node.rank(deployment="job/actor", **LARGE).do("publish", seq=1)


def pull_from(*sources: Node) -> dict[str, Any]:
    return {"seq": 1, "sources": [node.address for node in sources], "source": "job/actor"}


def start_pull(a: Node, c: Node, timeout_s: float) -> tuple[Rank, int]:
    """A rank of `c` that has a part of what it pulls from `a`, by a slow link; and the number of
    its order."""
    publish([a])
    a.limit_sending(SLOW_LINK)
    rollout = c.rank(deployment="job/rollout", timeout_s=timeout_s, **LARGE)
    before = c.received_bytes()
    pulling = rollout.ask("pull", **pull_from(a))
    under_way(c, before, 8 * MIB)
    return rollout, pulling


@pytest.mark.slow
@BOTH_FABRICS
@pytest.mark.parametrize("ways", ["both ways", "one way"])
def test_another_source_sends_what_is_missing_when_a_link_is_cut(
    network: Network, tmp_path: Path, fabric: str, ways: str
) -> None:
    a, b, c = start_nodes(network.hosts, tmp_path / "authority", fabric=fabric)
    publish([a, b])
    for node in (a, b):
        node.limit_sending(SLOW_LINK)
    rollout = c.rank(deployment="job/rollout", timeout_s=600.0, **LARGE)
    before = c.received_bytes()
    pulling = rollout.ask("pull", **pull_from(a, b))
    under_way(c, before, 8 * MIB)
    network.cut_one_way(c.host, a.host)
    if ways == "both ways":
        network.cut_one_way(a.host, c.host)
    report = rollout.answer(pulling, BREAK_S)
    assert "error" not in report, report
    assert report["attempts"] == 2
    assert report["moved"] == report["wanted"] == LARGE_BYTES
    assert rollout.do("check", seq=1)["holds"]
    # The rest came without what had arrived from the lost source.
    assert c.received_bytes() - before < 1.3 * LARGE_BYTES


@pytest.mark.slow
@BOTH_FABRICS
def test_a_pull_goes_on_when_its_only_link_is_healed(
    network: Network, tmp_path: Path, fabric: str
) -> None:
    a, _, c = start_nodes(network.hosts, tmp_path / "authority", fabric=fabric)
    rollout, pulling = start_pull(a, c, timeout_s=600.0)
    with network.partition(a.host, c.host):
        # Longer than the kernel waits for a machine that does not answer.
        wait_until(lambda: not connections(c, a))
    report = rollout.answer(pulling, BREAK_S)
    assert "error" not in report, report
    assert report["moved"] == report["wanted"] == LARGE_BYTES
    assert report["attempts"] == 2
    assert rollout.do("check", seq=1)["holds"]


def connections(node: Node, peer: Node) -> list[str]:
    """Established connections of a host to another node's StateManager."""
    text = node.host.run("ss", "--no-header", "--tcp", "state", "established").stdout
    return [line for line in text.splitlines() if f"{peer.host.address}:7411" in line]


@pytest.mark.slow
@BOTH_FABRICS
def test_a_source_that_stays_unreachable_is_a_typed_error(
    network: Network, tmp_path: Path, fabric: str
) -> None:
    a, _, c = start_nodes(network.hosts, tmp_path / "authority", fabric=fabric)
    rollout, pulling = start_pull(a, c, timeout_s=5.0)
    network.cut(a.host, c.host)
    report = rollout.answer(pulling, BREAK_S)
    assert report["error"] == "unavailable"
    assert a.address.partition("#")[0] in report["message"]
    network.heal(a.host, c.host)
    assert rollout.do("pull", **pull_from(a))["moved"] == LARGE_BYTES
    assert rollout.do("check", seq=1)["holds"]


@pytest.mark.slow
@BOTH_FABRICS
def test_a_migration_whose_link_is_cut_keeps_what_has_arrived(
    network: Network, tmp_path: Path, fabric: str
) -> None:
    a, _, c = start_nodes(network.hosts, tmp_path / "authority", fabric=fabric)
    state: dict[str, Any] = {"deployment": "job/actor", "optimizer": True, **LARGE}
    a.rank(**state).do("save", seq=3)
    a.limit_sending(SLOW_LINK)
    worker = c.rank(**state)
    order: dict[str, Any] = {"seq": 3, "sources": [a.address], "ranks": [0]}
    before = c.received_bytes()
    moving = worker.ask("migrate", **order)
    under_way(c, before, LARGE_BYTES // 2)
    with network.partition(a.host, c.host):
        report = worker.answer(moving, BREAK_S)
        assert report["error"] == "unavailable"
        assert a.address.partition("#")[0] in report["message"]
    # The second call fetches the blocks that are missing.
    assert 0 < worker.do("migrate", **order)["moved"] < 0.6 * LARGE_BYTES
    assert c.received_bytes() - before < 1.2 * LARGE_BYTES
    worker.do("load", seq=3)
    assert worker.do("check", seq=3)["holds"]
