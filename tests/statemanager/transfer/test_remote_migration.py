"""A version goes from node to node over TCP: verified, whole, and no block twice for a cut."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from plexrl.errors import CorruptStateError, PermissionDeniedError, StateLostError, UnavailableError
from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES
from plexrl.statemanager.client.migration import migrate
from plexrl.statemanager.client.reports import MoveReport
from plexrl.statemanager.protocol.messages import Fetch
from plexrl.statemanager.protocol.tickets import TicketRole
from tests.statemanager.client.test_migration import (
    NAME,
    check_loads,
    observer,
    offloaded,
    ranks_held,
)
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    NETWORK,
    Daemon,
    MakeShard,
    StartDaemon,
    wait_until,
)
from tests.statemanager.weight_sync import SERVING_TCP

ELEMENTS = 3 * MIB
STATE = 8 * ELEMENTS
SEED = int(os.environ.get("PLEXRL_SEED", "7"))


class Proxy:
    """A network between two nodes, which breaks after as many bytes as it is told."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.passed_bytes = 0
        self.budget: int | None = None
        """Bytes until the next break; absent: it holds."""
        self.cuts = 0
        self.flip_at: int | None = None
        """A byte of the stream that arrives changed."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._server.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            host, _, port = self.daemon.tcp.removeprefix("tcp://").rpartition(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._join, args=(near, far), daemon=True).start()

    def _join(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._pass, args=(far, near, True))
            back.start()
            self._pass(near, far, False)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, is_data: bool) -> None:
        with suppress(OSError):
            while received := source.recv(1 << 16):
                data = bytearray(received)
                if is_data:
                    if self.budget is not None and self.budget < len(data):
                        del data[self.budget :]
                        self.budget = None
                        self.cuts += 1
                        target.sendall(data)
                        break
                    if self.budget is not None:
                        self.budget -= len(data)
                    if self.flip_at is not None and self.flip_at < self.passed_bytes + len(data):
                        data[max(0, self.flip_at - self.passed_bytes)] ^= 1
                        self.flip_at = None
                    self.passed_bytes += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def source(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(**SERVING_TCP)


@pytest.fixture
def proxy(source: Daemon) -> Iterator[Proxy]:
    found = Proxy(source)
    yield found
    found.close()


def move(address: str, target: Daemon, *, seq: int = 1) -> MoveReport:
    ticket = target.ticket(role=TicketRole.AGENT)
    return migrate(
        [address],
        target.config.listen,
        deployment=NAME,
        seq=seq,
        ticket=ticket,
        network=NETWORK,
        timeout_s=DEADLINE_S,
    )


def leftovers(daemon: Daemon) -> list[Path]:
    """Records of what has arrived in part."""
    return sorted(Path(daemon.config.host_dir).glob("*.arriving"))


def check_empty_after_release(daemon: Daemon) -> None:
    with observer(daemon) as client:
        client.release(NAME)
        usage = client.usage()
    assert (usage["host_bytes"], usage["nvme_bytes"]) == (0, 0)
    assert leftovers(daemon) == daemon.host_files() == daemon.nvme_files() == []
    assert daemon.nvme_objects() == []


@pytest.mark.parametrize("source_host_bytes", [1, 64 * MIB], ids=["from nvme", "from host"])
@pytest.mark.parametrize("target_host_bytes", [1, 64 * MIB], ids=["to nvme", "to host"])
@pytest.mark.parametrize("elements", [64 * 1024, 1024 * 1024 + 16], ids=["small", "odd"])
def test_a_version_loads_bit_for_bit_where_it_was_fetched_to(
    start_daemon: StartDaemon,
    make_shard: MakeShard,
    source_host_bytes: int,
    target_host_bytes: int,
    elements: int,
) -> None:
    source = start_daemon(host_bytes=source_host_bytes, **SERVING_TCP)
    target = start_daemon(host_bytes=target_host_bytes)
    expected = offloaded(source, make_shard, ranks=2, elements=elements)
    report = move(source.tcp, target)
    tier = "nvme" if target_host_bytes == 1 else "host"
    assert (report.bytes_moved, report.tier) == (2 * elements * 8, tier)
    assert move(source.tcp, target).bytes_moved == 0
    check_loads(target, make_shard, expected, tier=tier)
    check_loads(source, make_shard, expected)
    check_empty_after_release(target)


def test_a_power_cut_after_a_fetch_loses_nothing(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon
) -> None:
    target = start_daemon()
    expected = offloaded(source, make_shard, ranks=2)
    move(source.tcp, target)
    source.kill()
    target.kill()
    for path in target.host_files():
        path.unlink()
    target.start()
    check_loads(target, make_shard, expected, tier="nvme")


def test_only_the_block_under_way_is_asked_for_again_when_the_network_breaks(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon, proxy: Proxy
) -> None:
    target = start_daemon()
    expected = offloaded(source, make_shard, elements=ELEMENTS)
    chance = random.Random(SEED)
    done = threading.Event()

    def break_often() -> None:
        while not done.wait(0.02):
            if proxy.budget is None and proxy.cuts < 8:
                proxy.budget = chance.randrange(3 * BLOCK_BYTES)

    breaking = threading.Thread(target=break_often)
    breaking.start()
    try:
        assert move(proxy.address, target).bytes_moved == STATE
    finally:
        done.set()
        breaking.join()
    assert proxy.passed_bytes < STATE + (proxy.cuts + 1) * BLOCK_BYTES + MIB
    check_loads(target, make_shard, expected)
    check_empty_after_release(target)


def test_a_byte_that_was_changed_on_the_way_is_noticed_and_fetched_again(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon, proxy: Proxy
) -> None:
    target = start_daemon()
    expected = offloaded(source, make_shard, elements=ELEMENTS)
    proxy.flip_at = STATE // 2
    assert move(proxy.address, target).bytes_moved == STATE
    assert proxy.flip_at is None
    assert proxy.passed_bytes > STATE + BLOCK_BYTES // 2
    check_loads(target, make_shard, expected)


def test_what_arrived_before_the_target_was_killed_is_not_asked_for_again(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon
) -> None:
    target = start_daemon(fault_points=("arrive.block:3",))
    expected = offloaded(source, make_shard, elements=ELEMENTS)
    pool = threading.Thread(
        target=suppressed, args=(lambda: move(source.tcp, target),), daemon=True
    )
    pool.start()
    wait_until(lambda: not target.is_alive())
    target.wait()
    assert len(leftovers(target)) == 1
    target.config = target.with_config(fault_points=())
    target.start()
    pool.join(DEADLINE_S)
    # The call that was under way carried on; all in all every block came once.
    assert ranks_held(target) == {0: "host"}
    assert leftovers(target) == []
    with observer(target) as client:
        assert client.usage()["host_bytes"] < STATE + MIB
    check_loads(target, make_shard, expected)


def test_blocks_of_a_killed_target_count_for_the_next_call(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon, proxy: Proxy
) -> None:
    target = start_daemon(fault_points=("arrive.block:3",))
    expected = offloaded(source, make_shard, elements=ELEMENTS)
    ticket = target.ticket(role=TicketRole.AGENT)
    with pytest.raises(UnavailableError):
        migrate(
            [proxy.address],
            target.config.listen,
            deployment=NAME,
            seq=1,
            ticket=ticket,
            network=NETWORK,
            timeout_s=3.0,
        )
    target.wait()
    target.config = target.with_config(fault_points=())
    target.start()
    assert move(proxy.address, target).bytes_moved == STATE - 3 * BLOCK_BYTES
    check_loads(target, make_shard, expected)
    check_empty_after_release(target)


def test_what_nobody_carries_on_with_gives_way_to_who_needs_the_room(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon
) -> None:
    target = start_daemon(
        host_bytes=STATE + 4 * MIB, nvme_bytes=1, fault_points=("arrive.block:3",)
    )
    offloaded(source, make_shard, elements=ELEMENTS)
    ticket = target.ticket(role=TicketRole.AGENT)
    with pytest.raises(UnavailableError):
        migrate(
            [source.tcp],
            target.config.listen,
            deployment=NAME,
            seq=1,
            ticket=ticket,
            network=NETWORK,
            timeout_s=3.0,
        )
    target.wait()
    target.config = target.with_config(fault_points=())
    target.start()
    rival = make_shard(target, deployment="job/critic", elements=ELEMENTS)
    rival.offload(1)
    assert leftovers(target) == []
    with closing(target.agent()) as client:
        client.release("job/critic")
        assert client.usage()["host_bytes"] == 0


def test_replicas_that_are_here_already_are_not_sent(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon, proxy: Proxy
) -> None:
    target = start_daemon()
    shards = [make_shard(source, rank=rank, world_size=2, elements=ELEMENTS) for rank in range(2)]
    for shard in shards:
        # As data parallel ranks: both hold the very same slices.
        shard.slices = shards[0].slices
        shard.register()
        shard.fill(1)
    for shard in shards:
        shard.offload(1)
    with observer(source) as client:
        assert client.usage()["host_bytes"] < STATE + MIB
    assert move(proxy.address, target).bytes_moved == STATE
    assert proxy.passed_bytes < STATE + MIB
    with observer(target) as client:
        assert client.usage()["host_bytes"] < STATE + MIB
    assert ranks_held(target) == {0: "host", 1: "host"}


def test_damage_at_the_source_is_not_taken_in(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    source, target = start_daemon(host_bytes=1, **SERVING_TCP), start_daemon()
    offloaded(source, make_shard, elements=ELEMENTS)
    [path] = source.nvme_objects()
    with path.open("r+b") as file:
        file.seek(-8192, os.SEEK_END)
        file.write(bytes(64))
    with pytest.raises(CorruptStateError):
        move(source.tcp, target)
    assert ranks_held(target) == {}


def test_a_version_that_is_nowhere_is_refused_by_name(
    start_daemon: StartDaemon, source: Daemon
) -> None:
    target = start_daemon()
    with pytest.raises(StateLostError, match="version 1 of 'job/actor'"):
        move(source.tcp, target)
    with closing(target.agent()) as agent, pytest.raises(StateLostError):
        agent.request(
            Fetch(source=source.tcp, deployment=NAME, seq=1, rank=0, stamp="not one that is there")
        )


def test_workers_may_not_have_versions_fetched(make_shard: MakeShard, source: Daemon) -> None:
    shard = make_shard(source)
    with pytest.raises(PermissionDeniedError):
        shard.client.request(Fetch(source=source.tcp, deployment=NAME, seq=1, rank=0, stamp=""))


AGENT = """
import sys
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.client.migration import migrate
migrate([sys.argv[1]], sys.argv[2], deployment="job/actor", seq=1,
        ticket=bytes.fromhex(sys.argv[3]), timeout_s=20.0, network=Network(is_trusted=True))
"""


@pytest.mark.slow
def test_whoever_is_killed_at_any_moment_the_migration_made_again_is_whole(
    start_daemon: StartDaemon, make_shard: MakeShard, source: Daemon, proxy: Proxy
) -> None:
    """kill -9 of source, target and agent; the seed is in `PLEXRL_SEED`."""
    target = start_daemon()
    expected = offloaded(source, make_shard, elements=ELEMENTS)
    chance = random.Random(SEED)
    ticket = target.ticket(role=TicketRole.AGENT).hex()
    pause = threading.Event()
    for _ in range(int(os.environ.get("PLEXRL_KILLS", "9"))):
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, proxy.address, target.config.listen, ticket],
            stderr=subprocess.DEVNULL,
        )
        victim = chance.choice(("source", "target", "agent"))
        passed = proxy.passed_bytes + chance.randrange(STATE)
        wait_until(lambda: proxy.passed_bytes >= passed or agent.poll() is not None)  # noqa: B023  # called at once
        if victim == "agent":
            agent.send_signal(signal.SIGKILL)
        else:
            daemon = source if victim == "source" else target
            daemon.kill()
            pause.wait(chance.random() * 0.1)
            daemon.start()
        agent.wait(DEADLINE_S)
        assert move(proxy.address, target).bytes_moved <= STATE
        check_loads(target, make_shard, expected)
        check_empty_after_release(target)


def suppressed(call: object) -> None:
    """Whatever becomes of it."""
    assert callable(call)
    with suppress(Exception):
        call()
