"""Several ranks of one node pull from another: every byte comes over the network once."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

import pytest

from plexrl.statemanager.client.client import PullReport
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from tests.statemanager.conftest import Daemon, StartDaemon, run_together
from tests.statemanager.test_delta import nudge
from tests.statemanager.weight_sync import SERVING_TCP, Rank, fsdp, tensor_parallel, whole

RANKS = 4


class CountingProxy:
    """Passes TCP connections on, and counts what comes back."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self.received_bytes = 0
        self._lock = threading.Lock()
        self._passing: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._socket.getsockname()[:2])
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._socket.accept()
            except OSError:
                return
            theirs = socket.create_connection(self._target)
            self._passing += [ours, theirs]
            for source, target, counts in ((ours, theirs, False), (theirs, ours, True)):
                arguments = (source, target, counts)
                self._threads.append(threading.Thread(target=self._pass_on, args=arguments))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        try:
            while part := source.recv(1 << 20):
                if counts:
                    with self._lock:
                        self.received_bytes += len(part)
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for each in self._passing:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (*self._passing, self._socket):
            each.close()


@pytest.fixture
def far(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(**SERVING_TCP)


@pytest.fixture
def near(start_daemon: StartDaemon, far: Daemon) -> Daemon:
    """The rollout's node, which has the same ticket key."""
    return start_daemon(ticket_key_file=far.config.ticket_key_file)


@pytest.fixture
def proxy(far: Daemon) -> Iterator[CountingProxy]:
    found = CountingProxy(far.tcp)
    yield found
    found.close()


@pytest.fixture
def trainers(far: Daemon) -> Iterator[list[Rank]]:
    ranks = [Rank(far, "job/actor", rank, fsdp(rank, 2)) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def replicas(near: Daemon, *, dtype: str = "F32") -> list[Rank]:
    boxes = [(name, whole(name)) for name in ("norm", "embed", "experts", "scale")]
    return [Rank(near, "job/rollout", rank, boxes, dtype=dtype) for rank in range(RANKS)]


def pull_all(
    ranks: list[Rank], source: str, version: int, delta: DeltaPolicy | None = None
) -> list[PullReport]:
    reports: dict[int, PullReport] = {}

    def pull(number: int) -> None:
        rank = ranks[number]
        reports[number] = rank.client.pull(
            sources=[source], source="job/actor", seq=version, wants=rank.slices, delta=delta
        )

    run_together(*(partial(pull, number) for number in range(len(ranks))))
    return [reports[number] for number in range(len(ranks))]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_replicas_have_their_bytes_brought_over_the_network_once(
    near: Daemon, proxy: CountingProxy, trainers: list[Rank], dtype: str
) -> None:
    ranks = replicas(near, dtype=dtype)
    for version in (1, 2, 3):
        for trainer in trainers:
            trainer.publish(version)
        before = proxy.received_bytes
        reports = pull_all(ranks, proxy.address, version)
        assert all(rank.holds(version) for rank in ranks)
        # The rank that came first had them brought; the others found them.
        brought = [report.relayed_bytes for report in reports]
        assert sorted(brought, key=str) == [0, 0, 0, ranks[0].nbytes]
        assert [report.bytes_moved for report in reports] == [rank.nbytes for rank in ranks]
        # Answers have heads, and each rank asks what there is.
        assert ranks[0].nbytes <= proxy.received_bytes - before < 1.2 * ranks[0].nbytes
    with closing(near.agent()) as agent:
        versions = agent.usage()["deployments"]["job/rollout"]["versions"]
    assert [version["seq"] for version in versions] == [2, 3]
    for rank in ranks:
        rank.close()


def test_a_delta_is_brought_once_as_well(
    near: Daemon, proxy: CountingProxy, trainers: list[Rank]
) -> None:
    ranks = replicas(near)
    for trainer in trainers:
        trainer.fill(1)
    for version in (1, 2, 3):
        for trainer in trainers:
            trainer.client.publish(seq=version, token=1)
        reports = pull_all(ranks, proxy.address, version, DeltaPolicy(block_bytes=64))
        brought = max(report.relayed_bytes or 0 for report in reports)
        if version == 1:
            assert brought == ranks[0].nbytes
        else:
            assert 0 < brought < 0.2 * ranks[0].nbytes
        assert all(bytes(r.arena.buffer) == bytes(ranks[0].arena.buffer) for r in ranks)
        pulled_plainly = Rank(near, "job/other", 0, ranks[0].boxes)
        pulled_plainly.pull([proxy.address], version)
        assert bytes(pulled_plainly.arena.buffer) == bytes(ranks[0].arena.buffer)
        pulled_plainly.close()
        for trainer in trainers:
            nudge(trainer, version)
    for rank in ranks:
        rank.close()


def test_what_was_published_again_under_its_number_is_brought_again(
    near: Daemon, proxy: CountingProxy, trainers: list[Rank]
) -> None:
    ranks = replicas(near)
    for trainer in trainers:
        trainer.publish(1)
    pull_all(ranks, proxy.address, 1)
    for trainer in trainers:
        trainer.fill(2)
        trainer.client.publish(seq=1, token=1)
    pull_all(ranks, proxy.address, 1)
    assert all(rank.holds(2) for rank in ranks)
    for rank in ranks:
        rank.close()


def test_ranks_that_share_nothing_pull_for_themselves(
    near: Daemon, proxy: CountingProxy, trainers: list[Rank]
) -> None:
    for trainer in trainers:
        trainer.publish(1)
    ranks = [Rank(near, "job/rollout", rank, tensor_parallel(rank, 2)) for rank in range(2)]
    reports = pull_all(ranks, proxy.address, 1)
    assert [report.relayed_bytes for report in reports] == [None, None]
    assert all(rank.holds(1) for rank in ranks)
    for rank in ranks:
        rank.close()


def test_without_room_here_every_rank_pulls_for_itself(
    start_daemon: StartDaemon, far: Daemon, proxy: CountingProxy, trainers: list[Rank]
) -> None:
    small = {"host_bytes": 4096, "nvme_bytes": 4096}
    near = start_daemon(ticket_key_file=far.config.ticket_key_file, **small)
    for trainer in trainers:
        trainer.publish(1)
    ranks = replicas(near)
    reports = pull_all(ranks, proxy.address, 1)
    assert [report.relayed_bytes for report in reports] == [None] * RANKS
    assert all(rank.holds(1) for rank in ranks)
    for rank in ranks:
        rank.close()
