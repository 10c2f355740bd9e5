"""Operations: health, metrics, systemd, the command line."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from plexrl.cli.app import app
from plexrl.errors import InvalidRequestError, StaleTokenError, UnavailableError
from plexrl.process.children.startup import load_config
from plexrl.process.memory.tuning import tune
from plexrl.statemanager.bytes.fair_queue import FairQueue
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.daemon.service_manager import ServiceManager
from plexrl.statemanager.observe.health import Health
from plexrl.statemanager.observe.http import ObservationServer
from plexrl.statemanager.protocol.messages import Confirm
from plexrl.statemanager.store.store import Store
from tests.free_ports import free_port
from tests.statemanager.conftest import (
    DEADLINE_S,
    MIB,
    Daemon,
    MakeShard,
    StartDaemon,
    wait_until,
)

DEPLOY = Path(__file__).parents[3] / "deploy" / "systemd"
TUNABLE = "glibc.cpu.x86_non_temporal_threshold=0x80000"


class Observed:
    """A daemon that serves metrics on a port."""

    def __init__(self, start_daemon: StartDaemon, **fields: Any) -> None:
        self._port = free_port()
        self.daemon: Daemon = start_daemon(metrics_port=self._port, **fields)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self._port}{path}", timeout=DEADLINE_S)

    def figures(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """All samples, by name and label values in the order of the label names."""
        return {
            (
                sample.name.removeprefix("plexrl_statemanager_"),
                tuple(value for _, value in sorted(sample.labels.items())),
            ): (sample.value)
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
        }


@pytest.fixture
def observed(start_daemon: StartDaemon) -> Observed:
    return Observed(start_daemon)


# Health


def test_a_daemon_is_healthy_until_a_directory_is_lost(observed: Observed) -> None:
    healthy = observed.get("/healthz")
    assert (healthy.status_code, healthy.json()) == (200, {"healthy": True, "reasons": []})
    directory = Path(observed.daemon.config.nvme_dir)
    directory.rename(directory.with_name("elsewhere"))
    sick = observed.get("/healthz")
    assert sick.status_code == 503
    assert "NVMe tier's directory" in sick.json()["reasons"][0]
    directory.with_name("elsewhere").rename(directory)
    assert observed.get("/healthz").status_code == 200
    assert observed.get("/else").status_code == 404


def test_full_tiers_are_reported(start_daemon: StartDaemon, make_shard: MakeShard) -> None:
    shard_bytes = 2 * 4 * 64 * 1024
    bound = shard_bytes + 8192
    observed = Observed(start_daemon, host_bytes=bound, nvme_bytes=bound)
    for name in "ab":
        make_shard(observed.daemon, deployment=f"{name}/actor").offload(1)
    sick = observed.get("/healthz")
    assert sick.status_code == 503
    assert "both tiers are full" in sick.json()["reasons"][0]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[StateManagerConfig]:
    """Configuration of a store in this process."""
    host = tempfile.mkdtemp(prefix="plexrl-test-", dir="/dev/shm")
    yield StateManagerConfig(
        node="n",
        listen=str(tmp_path / "s"),
        host_dir=host,
        host_bytes=MIB,
        nvme_dir=str(tmp_path / "nvme"),
        nvme_bytes=MIB,
        stuck_move_s=-1.0,
    )
    shutil.rmtree(host)


def test_a_stuck_move_and_a_closed_socket_are_reported(config: StateManagerConfig) -> None:
    line = FairQueue(1, 1)
    with closing(Store(config)) as store:
        health = Health(config, store, line, lambda: False)
        with line.slot("Save", "rank 0 of 'job/actor'"):
            told = " ".join(health.reasons())
        assert f"no connections are accepted on {config.listen}" in told
        assert "Save of rank 0 of 'job/actor' has been running for more than -1 s" in told
        patient = Health(replace(config, stuck_move_s=60.0), store, line, lambda: True)
        with line.slot("Save", "x"):
            assert not patient.reasons()


# Metrics


def test_metrics_report_moves_refusals_and_versions(
    observed: Observed, make_shard: MakeShard
) -> None:
    shard = make_shard(observed.daemon)
    nbytes = shard.offload(1).bytes_moved
    shard.load(1)
    with pytest.raises(StaleTokenError):
        shard.client.load(seq=1, token=0)
    figures = observed.figures()
    assert figures["move_bytes_sum", ("ok", "Save", "host")] == nbytes
    assert figures["move_bytes_sum", ("ok", "Load", "host")] == nbytes
    assert figures["move_seconds_count", ("stale_token", "Load", "")] == 1
    assert figures["move_seconds_bucket", ("+Inf", "ok", "Save", "host")] == 1
    assert figures["move_seconds_sum", ("ok", "Save", "host")] > 0
    assert figures["refused_total", ("stale_token",)] == 1
    assert figures["versions", ("job", "state", "", "host")] == 1
    assert figures["version_bytes", ("job", "state", "", "host")] == nbytes
    assert figures["tier_bytes", ("host",)] >= nbytes
    assert figures["tier_bytes_max", ("nvme",)] == 256 * MIB
    assert figures["host_resident_bytes", ()] >= nbytes
    assert figures["host_prefault_bytes", ()] == 0
    assert figures["arena_bytes", ("job",)] == shard.arena.resident_bytes()
    assert figures["connections", ()] == 1
    assert figures["moves_running", ()] == figures["moves_waiting", ()] == 0


def test_metrics_distinguish_equal_and_different_replicas(
    observed: Observed, make_shard: MakeShard
) -> None:
    elements = 16 * 1024
    shards = [
        make_shard(observed.daemon, rank=rank, world_size=3, elements=elements, registered=False)
        for rank in range(3)
    ]
    for rank, shard in enumerate(shards):
        # Replicas: all ranks declare the same slices.
        shard.slices = shards[0].slices
        shard.fill(7 if rank < 2 else 8)
        shard.register()
    for shard in shards:
        shard.snapshot(1)
    figures = observed.figures()
    assert figures["replica_sections_total", ("shared",)] == 1
    assert figures["replica_sections_total", ("different",)] == 1
    assert figures["replica_shared_bytes_total", ()] == 2 * 4 * elements


def test_metrics_count_what_loads_found_on_the_device(
    start_daemon: StartDaemon, make_shard: MakeShard
) -> None:
    observed = Observed(start_daemon, device_bytes=8 * MIB)
    coming = make_shard(observed.daemon, deployment="two/actor")
    coming.offload(1)
    leaving = make_shard(observed.daemon, deployment="one/actor")
    leaving.offload(1, successor=(coming.deployment, 1))
    # The load waits for the prefetch.
    nbytes = coming.load(1).bytes_moved
    assert observed.figures()["prefetched_bytes_total", ()] == nbytes


def test_idle_http_clients_block_nobody() -> None:
    server = ObservationServer(0, list, lambda: b"figures")
    silent = socket.create_connection(("127.0.0.1", server.port))
    with silent:
        answer = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=DEADLINE_S)
        assert answer.content == b"figures"
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    server.close()


# Clients that die


WORKER = """
import sys, msgspec
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.messages import OpenPublished
from tests.statemanager.conftest import Daemon, Shard

daemon = Daemon(msgspec.json.decode(sys.argv[1], type=StateManagerConfig))
shard = Shard(daemon)
shard.register()
shard.client.publish(seq=1, token=1)
reader = connect(daemon.config.listen, 20.0, daemon.worker_ticket("job/actor"))
exchange(reader, OpenPublished(source="job/actor", seq=1))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(daemon: Daemon) -> Iterator["subprocess.Popen[str]"]:
    """A process with a registered arena and a leased published version."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, msgspec.json.encode(daemon.config).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_the_leases_of_a_killed_worker_end(daemon: Daemon, worker: "subprocess.Popen[str]") -> None:
    agent = daemon.agent()
    try:
        assert "0" in agent.usage()["deployments"]["job/actor"]["arena_bytes"]
        worker.send_signal(signal.SIGKILL)
        wait_until(lambda: not agent.usage()["deployments"]["job/actor"]["arena_bytes"])
        agent.release("job/actor")
        # A leased version counts until its reader ends.
        wait_until(lambda: agent.usage()["host_bytes"] == 0)
    finally:
        agent.close()


# systemd


@pytest.fixture
def systemd() -> Iterator[socket.socket]:
    """A socket in place of systemd's notification socket."""
    folder = Path(tempfile.mkdtemp(prefix="plexrl-"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(DEADLINE_S)
        listening.bind(str(folder / "notify"))
        yield listening
    shutil.rmtree(folder)


def test_systemd_is_notified_of_start_watchdog_and_stop(systemd: socket.socket) -> None:
    lives = True
    manager = ServiceManager({"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "2000"})
    manager.ready(lambda: lives)
    assert systemd.recv(100) == b"READY=1"
    assert systemd.recv(100) == b"WATCHDOG=1"
    lives = False
    manager.stopping()
    while (said := systemd.recv(100)) == b"WATCHDOG=1":
        pass
    assert said == b"STOPPING=1"


@pytest.mark.parametrize("path", [None, "/nowhere/at/all", "@plexrl-nobody-listens"])
def test_without_systemd_notifications_have_no_effect(path: str | None) -> None:
    manager = ServiceManager({} if path is None else {"NOTIFY_SOCKET": path})
    manager.ready(lambda: True)
    manager.stopping()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = DEPLOY / "plexrl-statemanager.service"
    parsed = ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    parsed.read_string(unit.read_text())
    assert parsed["Service"]["Type"] == "notify"
    words = parsed["Service"]["ExecStart"].split()
    assert words[:3] == ["/usr/bin/env", "plexrl", "statemanager"]
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        copy = shutil.copy(unit, tmp_path)
        done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True)
        ours = [line for line in done.stderr.splitlines() if unit.name in line]
        assert (done.returncode, ours) == (0, [])


def test_the_units_configuration_is_complete() -> None:
    config = load_config(DEPLOY / "statemanager.json", StateManagerConfig)
    assert config.metrics_port == 9471


# The command line


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, TUNABLE),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, f"glibc.malloc.check=1:{TUNABLE}"),
        (
            {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1"},
            "glibc.cpu.x86_non_temporal_threshold=1",
        ),
    ],
)
def test_allocator_settings_are_defaults_that_the_operator_may_override(
    before: dict[str, str], after: str
) -> None:
    environment = tune({"A": "b", **before})
    assert environment["A"] == "b"
    assert environment.get("GLIBC_TUNABLES", after) == after


def test_the_commands_run_a_daemon_and_show_its_usage(
    start_daemon: StartDaemon, systemd: socket.socket, tmp_path: Path
) -> None:
    daemon = start_daemon()
    config = {**msgspec.to_builtins(daemon.config), "host_bytes": 1}
    daemon.terminate()
    path = tmp_path / "statemanager.json"
    path.write_text(json.dumps(config))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "plexrl.cli.app", "statemanager", "--config", str(path)),
            *("--host-bytes", "64MiB", "--metrics-port", "0"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NOTIFY_SOCKET": systemd.getsockname()},
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["metrics_port"] > 0
        assert systemd.recv(100) == b"READY=1"
        shown = CliRunner().invoke(app, ["statemanager-status", "--config", str(path), "--json"])
        assert json.loads(shown.stdout)["host_bytes_max"] == 64 * MIB
        table = CliRunner().invoke(app, ["statemanager-status", "--config", str(path)])
        assert re.search(r"host\W+0 B\W+64\.0 MiB", table.stdout)
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
        assert f"GLIBC_TUNABLES={tune({}).get('GLIBC_TUNABLES')}" in environment
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        assert systemd.recv(100) == b"STOPPING=1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


SHELL = """
import subprocess, sys
daemon = subprocess.Popen(sys.argv[1:])
print(daemon.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ends_with_parent", [False, True], ids=["by hand", "by a cluster"])
def test_a_daemon_ends_with_its_parent_only_if_configured(
    start_daemon: StartDaemon, tmp_path: Path, ends_with_parent: bool
) -> None:
    daemon = start_daemon()
    daemon.kill()
    path = tmp_path / "statemanager.json"
    path.write_bytes(msgspec.json.encode(daemon.config))
    # As the embedded cluster starts it, and as `plexrl statemanager` does.
    module = ("plexrl.statemanager", "--end-with-parent")
    command = module if ends_with_parent else ("plexrl.cli.app", "statemanager")
    shell = subprocess.Popen(
        [sys.executable, "-c", SHELL, sys.executable, "-m", *command, "--config", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    assert shell.stdin is not None
    started = psutil.Process(int(shell.stdout.readline()))
    try:
        assert json.loads(shell.stdout.readline())["ready"]
        shell.kill()
        shell.wait()
        if ends_with_parent:
            wait_until(lambda: not started.is_running())
        else:
            with closing(daemon.agent()) as agent:
                agent.request(Confirm())
            started.terminate()
            # A clean end.
            wait_until(lambda: not Path(daemon.config.host_dir).exists())
            wait_until(lambda: not started.is_running())
    finally:
        if started.is_running():
            started.kill()
        shell.stdin.close()
        shell.stdout.close()


def test_the_commands_name_missing_options(tmp_path: Path) -> None:
    nothing = CliRunner().invoke(app, ["statemanager", "--node", "n"])
    assert isinstance(nothing.exception, InvalidRequestError)
    assert "--listen, --host-dir" in nothing.exception.message
    wrong = CliRunner().invoke(app, ["statemanager", "--host-bytes", "lots"])
    assert wrong.exit_code == 2
    assert "'lots' is not a size" in wrong.output
    key = str(tmp_path / "ticket.key")
    asked = ["statemanager-status", "--listen", "/nowhere", "--ticket-key-file", key]
    nobody = CliRunner().invoke(app, asked)
    assert isinstance(nobody.exception, UnavailableError)
