"""Weight sync between layouts, dtypes and nodes, through real daemons."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from typing import cast

import msgspec
import numpy as np
import pytest

from plexrl.errors import StateLostError
from plexrl.statemanager.client.reports import PullReport
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.layout.plan.balance import PullSource
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.plan.plan import make_plan
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.store.receiving.pull_target import HostTarget
from plexrl.statemanager.store.receiving.reader import VersionReader
from plexrl.statemanager.transfer.pull import KnownLayouts, Puller
from plexrl.statemanager.transfer.transport.choice import Transports
from tests.statemanager.conftest import DEADLINE_S, NETWORK, Daemon, StartDaemon, wait_until
from tests.statemanager.weight_sync import SERVING_TCP, Rank, fsdp, tensor_parallel, whole

ACTOR, ROLLOUT = "job/actor", "job/rollout"


@pytest.fixture
def nodes(start_daemon: StartDaemon) -> list[Daemon]:
    """Two that serve each other over TCP."""
    return [start_daemon(**SERVING_TCP) for _ in range(2)]


@pytest.fixture
def trainers(nodes: list[Daemon]) -> Iterator[list[Rank]]:
    """Four ranks, two on a node, each with a quarter of the rows."""
    ranks = [Rank(nodes[rank // 2], ACTOR, rank, fsdp(rank, 4)) for rank in range(4)]
    yield ranks
    for rank in ranks:
        rank.close()


def check(report: PullReport, rank: Rank) -> None:
    """Every byte that was wanted came once."""
    assert report.bytes_moved == report.bytes_wanted == rank.nbytes
    assert sum(report.bytes_by_source.values()) == rank.nbytes


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_two_tensor_parallel_ranks_pull_what_four_fsdp_ranks_published(
    nodes: list[Daemon], trainers: list[Rank], way: str, dtype: str
) -> None:
    sources = [node.config.listen if way == "shared memory" else node.tcp for node in nodes]
    rollouts = [
        Rank(nodes[rank], ROLLOUT, rank, tensor_parallel(rank, 2), dtype=dtype) for rank in range(2)
    ]
    for version in (1, 2, 3):
        for trainer in trainers:
            trainer.publish(version)
        for rollout in rollouts:
            report = rollout.pull(sources, version)
            check(report, rollout)
            assert set(report.bytes_by_source) == set(sources)
            assert rollout.holds(version)
    for rollout in rollouts:
        rollout.close()


def test_replicas_on_two_nodes_share_a_pull(nodes: list[Daemon]) -> None:
    boxes = [(name, whole(name)) for name in ("embed", "experts", "norm", "scale")]
    trainers = [Rank(node, ACTOR, rank, boxes) for rank, node in enumerate(nodes)]
    rollout = Rank(nodes[0], ROLLOUT, 0, boxes)
    for trainer in trainers:
        trainer.publish(1)
    report = rollout.pull([node.tcp for node in nodes], 1)
    check(report, rollout)
    # The two large tensors are within an eighth of each other.
    assert min(report.bytes_by_source.values()) > 0.4 * rollout.nbytes
    assert rollout.holds(1)
    for rank in (*trainers, rollout):
        rank.close()


def test_a_replica_takes_over_from_a_source_that_is_gone(nodes: list[Daemon]) -> None:
    boxes = [(name, whole(name)) for name in ("embed", "experts", "norm", "scale")]
    trainers = [Rank(node, ACTOR, rank, boxes) for rank, node in enumerate(nodes)]
    rollout = Rank(nodes[0], ROLLOUT, 0, boxes)
    for trainer in trainers:
        trainer.publish(1)
    sources = [node.tcp for node in nodes]
    nodes[1].kill()
    report = rollout.pull(sources, 1)
    assert set(report.bytes_by_source) == {sources[0]}
    assert rollout.holds(1)
    for rank in (*trainers, rollout):
        rank.close()


class Interrupted:
    """A reader to which something happens between its last byte and its confirmation."""

    def __init__(self, source: VersionReader, happen: Callable[[], None]) -> None:
        self._source, self._happen = source, happen

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def confirm(self) -> None:
        self._happen()
        self._source.confirm()


@pytest.mark.parametrize("comes_back", [True, False])
def test_bytes_of_a_daemon_that_died_before_it_confirmed_are_pulled_again(
    nodes: list[Daemon], comes_back: bool
) -> None:
    boxes = fsdp(0, 1)
    trainers = [Rank(node, ACTOR, rank, boxes) for rank, node in enumerate(nodes)]
    rollout = Rank(nodes[0], ROLLOUT, 0, tensor_parallel(0, 1))
    for trainer in trainers:
        trainer.publish(1)
    died: list[str] = []

    def die() -> None:
        if not died:
            died.append(nodes[1].config.listen)
            nodes[1].kill()
            if comes_back:
                nodes[1].start()

    layouts = KnownLayouts()
    ways = Transports(
        NETWORK, layouts.find, ticket=nodes[0].worker_ticket("job/rollout"), timeout_s=DEADLINE_S
    )

    def opened(
        held: contextlib.ExitStack, address: str, deployment: str, seq: int, known: Collection[str]
    ) -> Sequence[VersionReader]:
        readers = ways.open(held, address, deployment, seq, known)
        if address == nodes[1].config.listen:
            return [cast("VersionReader", Interrupted(reader, die)) for reader in readers]
        return readers

    # Where it comes back it is the only source; else the other node has all of it.
    sources = [node.config.listen for node in (nodes[1:] if comes_back else nodes)]
    puller = Puller(opened, layouts, DEADLINE_S)
    target = np.frombuffer(rollout.arena.buffer, dtype=np.uint8)
    wants = Layout.of(rollout.slices)
    result = puller.pull(sources, ACTOR, 1, wants, HostTarget(target))
    assert died
    assert result.attempts == 2
    assert result.bytes_moved > result.bytes_wanted == sum(result.bytes_by_source.values())
    assert rollout.holds(1)
    for rank in (*trainers, rollout):
        rank.close()


def train(config: dict[str, object], steps: int, pulled_one: Event) -> None:
    """A trainer in a process of its own: a step, a publish, the next step. It is not through before
    a version was pulled."""
    daemon = Daemon(msgspec.convert(config, StateManagerConfig))
    rank = Rank(daemon, ACTOR, 0, fsdp(0, 1))
    for version in range(1, steps + 1):
        rank.publish(version)
        if version == steps // 2:
            assert pulled_one.wait(DEADLINE_S)
    rank.close()


PULLS = {
    "all bytes": ("F32", None),
    "a cast": ("BF16", None),
    "a delta": ("F32", DeltaPolicy(changed_max=1.0)),
    "a delta of a cast": ("BF16", DeltaPolicy(changed_max=1.0)),
}


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
@pytest.mark.parametrize("what", sorted(PULLS))
def test_a_rollout_pulls_whole_versions_while_the_trainer_goes_on(
    nodes: list[Daemon], way: str, what: str
) -> None:
    steps = 40
    node = nodes[0]
    dtype, delta = PULLS[what]
    rollout = Rank(node, ROLLOUT, 0, tensor_parallel(0, 1), dtype=dtype)
    sources = [node.config.listen if way == "shared memory" else node.tcp]
    config = msgspec.to_builtins(node.config)
    context = get_context("forkserver")
    pulled_one = context.Event()
    trainer = context.Process(target=train, args=(config, steps, pulled_one))
    trainer.start()
    pulled: set[int] = set()

    def newest() -> int:
        with contextlib.closing(node.agent()) as agent:
            versions = agent.usage()["deployments"].get(ACTOR, {}).get("versions", [])
        return max((int(version["seq"]) for version in versions), default=0)

    def caught_up() -> bool:
        seq = newest()
        if seq and seq not in pulled:
            with contextlib.suppress(StateLostError):
                # It may be replaced between the question and the pull, never during the pull.
                rollout.client.pull(
                    sources=sources, source=ACTOR, seq=seq, wants=rollout.slices, delta=delta
                )
                assert rollout.holds(seq)
                pulled.add(seq)
                pulled_one.set()
        return steps in pulled

    wait_until(caught_up)
    trainer.join(DEADLINE_S)
    assert trainer.exitcode == 0
    assert len(pulled) > 1
    rollout.close()


@pytest.mark.parametrize("way", ["shared memory", "tcp"])
def test_a_slow_reader_gets_its_version_and_the_trainer_does_not_wait(
    nodes: list[Daemon], way: str
) -> None:
    node = nodes[0]
    trainer = Rank(node, ACTOR, 0, fsdp(0, 1))
    rollout = Rank(node, ROLLOUT, 0, tensor_parallel(0, 1))
    other = Rank(node, "job/other", 0, tensor_parallel(0, 1))
    address = node.config.listen if way == "shared memory" else node.tcp
    layouts = KnownLayouts()
    ways = Transports(
        NETWORK, layouts.find, ticket=node.worker_ticket(ROLLOUT), timeout_s=DEADLINE_S
    )
    trainer.publish(1)
    with contextlib.ExitStack() as stack:
        [reader] = ways.open(stack, address, ACTOR, 1, ())
        plan = make_plan([PullSource(id="0", layout=reader.layout)], [Layout.of(rollout.slices)])
        copies = plan.targets[0].copies[0]
        target = np.frombuffer(rollout.arena.buffer, dtype=np.uint8)
        for index in range(len(copies)):
            reader.read(copies.chosen(slice(index, index + 1)), target)
            # This thread reads on only after the trainer's next version is published and pulled.
            trainer.publish(2 + index)
            other.pull([address], 2 + index)
            assert other.holds(2 + index)
        assert len(copies) > 2
        reader.confirm()
    assert rollout.holds(1)
    for rank in (trainer, rollout, other):
        rank.close()


def test_a_base_that_somebody_reads_stays_until_it_is_done(nodes: list[Daemon]) -> None:
    """Two versions are kept; a third is there for as long as a reader has it open."""
    node = nodes[0]
    trainer = Rank(node, ACTOR, 0, fsdp(0, 1))
    rollout = Rank(node, ROLLOUT, 0, tensor_parallel(0, 1))
    layouts = KnownLayouts()
    ways = Transports(
        NETWORK, layouts.find, ticket=node.worker_ticket(ROLLOUT), timeout_s=DEADLINE_S
    )
    trainer.publish(1)
    with contextlib.ExitStack() as stack:
        [held] = ways.open(stack, node.tcp, ACTOR, 1, ())
        for version in (2, 3, 4):
            trainer.publish(version)
            rollout.client.pull(
                sources=[node.tcp],
                source=ACTOR,
                seq=version,
                wants=rollout.slices,
                delta=DeltaPolicy(changed_max=1.0),
            )
            assert rollout.holds(version)
        plan = make_plan([PullSource(id="0", layout=held.layout)], [Layout.of(rollout.slices)])
        target = np.frombuffer(rollout.arena.buffer, dtype=np.uint8)
        held.read(plan.targets[0].copies[0], target)
        held.confirm()
        assert rollout.holds(1)
    with pytest.raises(StateLostError):
        rollout.pull([node.tcp], 1)
    trainer.close()
    rollout.close()
