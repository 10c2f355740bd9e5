"""Moves take turns, tenant by tenant in the order they came, and the line has an end."""

import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from plexrl.errors import ConnectionLostError, OverloadedError
from plexrl.statemanager.bytes.fair_queue import FairQueue
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.daemon.server import DaemonServer
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.protocol.channel import Kind
from plexrl.statemanager.protocol.connection import connect
from plexrl.statemanager.protocol.messages import OpenPublished
from plexrl.statemanager.store.store import Store
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    Daemon,
    MakeShard,
    Shard,
    StartDaemon,
    run_together,
    wait_until,
)


def test_moves_without_a_place_wait_in_order() -> None:
    line = FairQueue(moves_max=1, waiting_max=8)
    done: list[int] = []

    def move(index: int) -> None:
        with line.slot("Save", str(index)):
            done.append(index)

    threads = [threading.Thread(target=move, args=(index,)) for index in range(6)]
    with line.slot("Load", "first"):
        assert [move.kind for move in line.running()] == ["Load"]
        for index, thread in enumerate(threads):
            thread.start()
            wait_until(lambda index=index: line.waiting() == index + 1)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert done == list(range(6))
    assert not line.running()


def wait_in_line(line: FairQueue) -> None:
    with line.slot("Save", "b"):
        pass


def test_a_move_beyond_the_line_is_told_to_come_back() -> None:
    line = FairQueue(moves_max=1, waiting_max=1)
    with line.slot("Save", "a"):
        waiting = threading.Thread(target=wait_in_line, args=(line,))
        waiting.start()
        wait_until(lambda: line.waiting() == 1)
        with (
            pytest.raises(OverloadedError, match="1 wait already") as refused,
            line.slot("S", "c"),
        ):
            pytest.fail("there was no place")
        assert refused.value.details["retry_after_s"] == pytest.approx(0.1)
    waiting.join()


def test_a_move_that_fails_gives_its_place_back() -> None:
    line = FairQueue(moves_max=1, waiting_max=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"), line.slot("Save", "a"):
            raise ValueError("no")
    assert not line.running()


def test_tenants_that_wait_take_turns() -> None:
    line = FairQueue(moves_max=1, waiting_max=8)
    done: list[str] = []

    def move(tenant: str, index: int) -> None:
        with line.slot("Save", "x", tenant):
            done.append(f"{tenant}{index}")

    came = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("c", 1)]
    threads = [threading.Thread(target=move, args=each) for each in came]
    with line.slot("Load", "first"):
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda count=count: line.waiting() == count)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert line.waiting() == 0


def test_a_move_whose_client_dies_in_line_is_taken_out_of_it(tmp_path: Path) -> None:
    host_dir = tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm")
    run_dir = tempfile.mkdtemp(prefix="plexrl-")
    config = StateManagerConfig(
        node="n",
        listen=f"{run_dir}/sm.sock",
        host_dir=host_dir,
        host_bytes=64 * MIB,
        nvme_dir=str(tmp_path / "nvme"),
        nvme_bytes=64 * MIB,
        moves_max=1,
    )
    store = Store(config)
    server = DaemonServer(config, store, CpuDevice())
    accepting = threading.Thread(target=server.serve)
    accepting.start()
    daemon = Daemon(config)
    shard, patient = Shard(daemon), Shard(daemon, deployment="b/actor")
    shard.register()
    patient.register()
    before = server.connections()
    try:
        with ThreadPoolExecutor(1) as pool:
            held = ExitStack()
            held.enter_context(server.services.move_queue.slot("Save", "x"))
            dying = connect(config.listen, DEADLINE_S, daemon.worker_ticket("job/actor"))
            dying.send(Kind.REQUEST, OpenPublished(source="job/actor", seq=1))
            wait_until(lambda: server.services.move_queue.waiting() == 1)
            saving = pool.submit(patient.snapshot, 1)
            wait_until(lambda: server.services.move_queue.waiting() == 2)
            dying.close()
            wait_until(lambda: server.services.move_queue.waiting() == 1)
            wait_until(lambda: server.connections() == before)
            assert not saving.done()
            held.close()
            saving.result(DEADLINE_S)
    finally:
        for one in (shard, patient):
            one.close()
        server.close()
        accepting.join()
        store.close()
        shutil.rmtree(host_dir)
        shutil.rmtree(run_dir)


def test_a_daemon_with_one_place_moves_everything_in_turn(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    daemon: Daemon = start_daemon(moves_max=1)
    shards = [make_shard(daemon, deployment=f"{name}/actor") for name in "abcd"]
    run_together(*(lambda shard=shard: shard.offload(1) for shard in shards))
    run_together(*(lambda shard=shard: shard.load(1) for shard in shards))


def test_a_waiting_move_is_given_up_only_if_its_client_has_left() -> None:
    line = FairQueue(moves_max=1, waiting_max=8)
    done: list[str] = []

    def move(who: str, is_there: bool) -> None:
        with line.slot("Save", who, is_there=lambda: is_there):
            done.append(who)

    with ThreadPoolExecutor(2) as threads, line.slot("Load", "first"):
        stays = threads.submit(move, "stays", True)
        wait_until(lambda: line.waiting() == 1)
        with pytest.raises(ConnectionLostError):
            threads.submit(move, "left", False).result(DEADLINE_S)
        assert line.waiting() == 1
    stays.result()
    assert done == ["stays"]
