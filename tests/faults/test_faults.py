"""Faults on a live cluster with three jobs: all complete, with the weights of undisturbed runs."""

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.faults.controller import STEPS
from tests.faults.live import LiveCluster, stopped_for, wait_until
from tests.scheduler.postgres import PostgresServer, server_folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PARTS = ("plexrl.router", "plexrl.scheduler", "plexrl.statemanager", "plexrl.worker")
FULL_S = 20.0
STOPPED_S = {"plexrl.scheduler": 45.0}
"""Longer than the router waits for an answer of the scheduler."""
STOPPED_S_USUAL = 10.0
CLIENTS = """
import socket, sys, time
clients = []
for number in range(1100):
    clients.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30))
    if number % 2:
        clients[-1].sendall(b"POST /v1/jobs HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 1000\\r\\n")
print("connected", flush=True)
time.sleep(3600)
"""


def begin(cluster: LiveCluster, chance: random.Random, **options: str) -> None:
    """Start the cluster and its three jobs; returns at a step that the seed decides."""
    cluster.begin(**options)
    cluster.run_jobs()
    cluster.at_step(chance.randrange(1, STEPS // 2))


def assert_same(found: dict[str, str], undisturbed: dict[str, str]) -> None:
    """Every job that ran has completed, with the weights of an undisturbed run."""
    assert len(found) >= 3
    assert found == {name: undisturbed[name] for name in found}


@pytest.mark.parametrize("module", PARTS)
def test_killed_part(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str], module: str
) -> None:
    begin(cluster, chance)
    cluster.part(module).kill()
    assert_same(cluster.weights(), undisturbed)


def test_killed_worker(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    begin(cluster, chance)
    cluster.worker(chance.randrange(16)).kill()
    assert_same(cluster.weights(), undisturbed)


@pytest.mark.parametrize("module", PARTS)
def test_stopped_part(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str], module: str
) -> None:
    begin(cluster, chance)
    stopped_for([cluster.part(module)], STOPPED_S.get(module, STOPPED_S_USUAL))
    assert_same(cluster.weights(), undisturbed)


def test_stopped_worker(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    begin(cluster, chance)
    stopped_for([cluster.worker(chance.randrange(16))], STOPPED_S_USUAL)
    assert_same(cluster.weights(), undisturbed)


@pytest.mark.parametrize("where", ["disk", "shared memory"])
def test_full_file_system(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str], where: str
) -> None:
    begin(cluster, chance)
    free = cluster.fill(cluster.data_dir if where == "disk" else "/dev/shm")
    time.sleep(FULL_S)
    free()
    assert_same(cluster.weights(), undisturbed)


def test_disk_full_at_restart(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    begin(cluster, chance)
    free = cluster.fill(cluster.data_dir)
    cluster.part("plexrl.scheduler").kill()
    time.sleep(FULL_S)
    free()
    assert_same(cluster.weights(), undisturbed)


def test_damaged_nvme_block(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    # With so small a host tier most versions lie on NVMe, and are read from there at every switch.
    begin(cluster, chance, host_memory_bytes=str(4 << 20))
    nvme = cluster.head.path(cluster.data_dir) / "nodes" / "node0" / "nvme"
    daemon = cluster.part("plexrl.statemanager")
    spilled: list[Path] = []

    def look() -> bool:
        # Stopped, so that nobody takes away what is about to be damaged.
        daemon.suspend()
        spilled.extend(nvme.rglob("*.object"))
        if not spilled:
            daemon.resume()
        return bool(spilled)

    wait_until(look, "no version was ever spilled")
    newest = max(spilled, key=lambda each: each.stat().st_mtime_ns)
    with newest.open("r+b") as file:
        at = chance.randrange(newest.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    daemon.resume()
    assert_same(cluster.weights(), undisturbed)


def test_damaged_payloads(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    begin(cluster, chance)
    blobs = cluster.head.path(cluster.data_dir) / "blobs"
    router = cluster.part("plexrl.router")
    # Stopped, so that no payload is being written. A recovery needs those of the kept operations.
    router.suspend()
    for path in blobs.glob("*.in"):
        os.truncate(path, chance.choice((0, path.stat().st_size // 2)))
    router.kill()
    for index in range(4):
        cluster.worker(index).kill()
    assert_same(cluster.weights(), undisturbed)


def test_lost_host_tier(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    begin(cluster, chance)
    daemon = cluster.part("plexrl.statemanager")
    # Stopped, so that nobody loads what is about to go.
    daemon.suspend()
    for path in cluster.head.path("/dev/shm").rglob("*"):
        if path.suffix in (".version", ".segment"):
            path.unlink()
    daemon.kill()
    assert_same(cluster.weights(), undisturbed)


def test_database_away(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    binaries = server_folder()
    assert binaries is not None, "PostgreSQL is not installed: apt-get install postgresql"
    inside = "/srv/postgres"
    server = PostgresServer(binaries, cluster.head.on_disk(inside))
    try:
        begin(cluster, chance, journal=server.database(inside))
        server.stop()
        time.sleep(FULL_S)
        server.start()
        assert_same(cluster.weights(), undisturbed)
    finally:
        server.close()


@pytest.mark.parametrize("routers", ["1", "2"])
def test_router_ended_in_order_with_a_job_waiting(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str], routers: str
) -> None:
    begin(cluster, chance, routers=routers)
    cluster.run_job("latecomer")
    for _ in range(2):
        time.sleep(chance.uniform(2.0, 4.0))
        os.kill(cluster.part("plexrl.router").pid, signal.SIGTERM)
    assert_same(cluster.weights(), undisturbed)


def test_cluster_ended_in_order_and_started_again_with_a_job_waiting(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    begin(cluster, chance)
    cluster.run_job("latecomer")
    time.sleep(chance.uniform(2.0, 4.0))
    cluster.restart()
    assert_same(cluster.weights(), undisturbed)


def test_idle_and_half_sent_connections(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str]
) -> None:
    begin(cluster, chance)
    port = cluster.environment["PLEXRL_URL"].rpartition(":")[2]
    clients = cluster.head.start("python", "-c", CLIENTS, port)
    clients.wait_for("connected")
    assert_same(cluster.weights(), undisturbed)
    assert clients.poll() is None
