"""A cluster leaves nothing behind, however it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner, Result

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.data_dir.endpoint import NAME as ENDPOINT_FILE
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.cluster.supervisor import Supervisor, run_supervisor
from plexrl.errors import ConflictError, UnknownJobError
from plexrl.process.folders.folders import Folders
from plexrl.process.folders.operator_key import operator_key
from tests.cluster.tools import VOCABULARY, process_of, some_batch, wait_until
from tests.small_disk import small_disk

MODEL = plexrl.tiny_qwen2(VOCABULARY)

pytestmark = pytest.mark.usefixtures("own_fork_servers")


@pytest.mark.parametrize(
    "sig",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_a_killed_supervisor_and_a_signal_ends_its_successor_without_a_trace(
    tmp_path: Path, sig: signal.Signals
) -> None:
    killed = start_embedded(tmp_path, virtual_gpus=1)
    children = psutil.Process(killed.pid).children(recursive=True)
    os.kill(killed.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    killed.close()
    running = start_embedded(tmp_path, virtual_gpus=2)
    folders = Folders.of(tmp_path)
    with plexrl.connect(running.url, running.api_key) as cluster:
        assert cluster.status()["nodes"] == 1
        actor = cluster.create_job("cut-off").train_deployment("actor", MODEL, workers=2)
        actor.forward_backward(some_batch(1), plexrl.losses.grpo()).result()
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) >= 7, "router, scheduler, StateManager, agent, fork server, two workers"
    os.kill(running.pid, sig)
    running.close()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert not folders.run.exists()
    assert not folders.shared_memory.exists()
    assert not (tmp_path / "cluster.json").exists()


@pytest.mark.slow
def test_a_signal_ends_a_cluster_whose_disk_became_read_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        data = disk.path / "data"
        command = [sys.executable, "-m", "plexrl.cli.app", "up", "--data-dir", str(data)]
        errors = tmp_path / "errors"
        with errors.open("w") as file:
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
        try:
            wait_until((data / ENDPOINT_FILE).exists, errors.read_text())
            folders = Folders.of(data)
            children = psutil.Process(running.pid).children(recursive=True)
            # Open files stay writable: Linux refuses to make their own mount read-only.
            for options in (("--bind",), ("-o", "remount,bind,ro")):
                subprocess.run(["mount", *options, str(data), str(data)], check=True)
            try:
                running.terminate()
                assert running.wait(60) == 0
                _, alive = psutil.wait_procs(children, timeout=30)
            finally:
                subprocess.run(["umount", "-l", str(data)], check=True)
        finally:
            running.kill()
            running.wait()
    assert alive == []
    assert "Traceback" not in errors.read_text()
    assert not folders.run.exists()
    assert not folders.shared_memory.exists()


class NeverStarting:
    """Nodes whose start never ends."""

    join = False
    gpus = None

    def __init__(self) -> None:
        self.stopped = False

    async def start(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True


def test_a_signal_ends_a_starting_cluster(tmp_path: Path) -> None:
    nodes = NeverStarting()
    supervisor = Supervisor(ClusterOptions(data_dir=tmp_path), nodes=lambda *_: nodes)
    run_supervisor(supervisor, lambda _: None, None)
    assert nodes.stopped
    assert not Folders.of(tmp_path).run.exists()


EMBEDDING = """
import sys, threading, time
from pathlib import Path
from plexrl.cluster.embedded.start import start_embedded
def start():
    print(start_embedded(Path(sys.argv[1]), virtual_gpus=1).pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_controllers_embedded_cluster_ends_and_cleans_up(tmp_path: Path) -> None:
    """The cluster is started from a thread; the end of that thread must not end it."""
    controller = subprocess.Popen(
        [sys.executable, "-c", EMBEDDING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    supervisor = psutil.Process(int(controller.stdout.readline()))
    assert supervisor.is_running()
    controller.kill()
    controller.wait()
    controller.stdout.close()
    wait_until(lambda: not supervisor.is_running(), "the cluster outlives its controller")
    assert not Folders.of(tmp_path).shared_memory.exists()


@pytest.mark.slow
def test_a_restart_on_the_same_data_continues_its_jobs(tmp_path: Path) -> None:
    first = start_embedded(tmp_path, virtual_gpus=2)
    with plexrl.connect(first.url, first.api_key) as cluster:
        actor = cluster.create_job("long", job_id="long").train_deployment(
            "actor", MODEL, workers=2
        )
        for step in range(3):
            actor.forward_backward(some_batch(step), plexrl.losses.grpo())
            actor.optim_step(learning_rate=1e-2).result()
        want = actor.forward(some_batch(9)).result().logprobs
    first.close()
    second = start_embedded(tmp_path, virtual_gpus=2)
    try:
        with (
            plexrl.connect(second.url, second.api_key) as cluster,
            cluster.attach_job("long") as job,
        ):
            actor = job.train_deployment("actor", MODEL, workers=2)
            got = actor.forward(some_batch(9)).result(120).logprobs
    finally:
        second.close()
    assert all((a == b).all() for a, b in zip(want, got, strict=True))


def test_restarted_parts_are_counted_in_health_and_status(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster
) -> None:
    wait_until(lambda: not cluster.status()["conditions"], "a condition does not end")
    health = httpx.get(f"{embedded.url}/v1/health", timeout=60).json()
    assert (health["ok"], health["conditions"]) == (True, [])
    # Other tests kill parts of this cluster, too.
    count = health["restarts"] + 1
    process_of(embedded, "plexrl.scheduler").kill()
    wait_until(lambda: cluster.status()["restarts"] == count, "no restart is reported")
    wait_until(lambda: not cluster.status()["conditions"], "a condition does not end")
    status = cluster.status()
    assert status["parts"]["scheduler"]["last_restart_at"] == status["last_restart_at"]
    with plexrl.connect(embedded.url, cluster.create_tenant("restarted")) as tenant:
        status = tenant.status()
        assert status["restarts"] == count
        assert "parts" not in status
    health = httpx.get(f"{embedded.url}/v1/health", timeout=60).json()
    assert (health["ok"], health["restarts"]) == (True, count)
    assert "scheduler" not in str(health["conditions"])
    figures = httpx.get(f"{embedded.url}/v1/metrics", timeout=60).text
    assert f"plexrl_part_restarts_total {count:.1f}" in figures
    shown = CliRunner().invoke(app, ["status", "--data-dir", str(embedded.data_dir)]).stdout
    assert "parts restarted" in shown
    assert f"{count}, the last at 20" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]")]
)
def test_up_listens_on_the_given_host_warns_of_exposure_and_logs(
    tmp_path: Path, host: str, own: str
) -> None:
    where = ("--data-dir", str(tmp_path), "--virtual-gpus", "1", "--host", host, "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "plexrl.cli.app", "up", *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    endpoint = json.loads(process.stdout.readline())
    try:
        assert endpoint["url"].startswith(f"http://{own}:")
        assert httpx.get(f"{endpoint['url']}/v1/health", timeout=60).json()["scheduler"]
        (router,) = [
            each
            for each in psutil.Process(process.pid).children(recursive=True)
            if "plexrl.router" in each.cmdline()
        ]
        addresses = {c.laddr.ip for c in router.net_connections() if c.status == "LISTEN"}
        assert addresses == {host}
    finally:
        process.terminate()
        _, output = process.communicate(timeout=60)
    is_exposed = host != "127.0.0.1"
    assert ("without TLS" in output) == is_exposed
    log = (tmp_path / "logs" / "up.log").read_text()
    for line in ("scheduler runs as process", "the cluster is up", "the cluster has ended"):
        assert line in log
    assert ("without TLS" in log) == is_exposed
    assert operator_key(tmp_path) not in log + json.dumps(endpoint)
    assert endpoint["key_file"] == str(tmp_path / "operator.key")


@pytest.mark.parametrize(
    ("host", "is_exposed"),
    [
        *((host, False) for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost")),
        *((host, True) for host in ("0.0.0.0", "::", "10.0.0.1", "head")),
    ],
)
def test_all_hosts_but_those_of_the_loopback_are_exposed(
    tmp_path: Path, host: str, is_exposed: bool
) -> None:
    assert ClusterOptions(data_dir=tmp_path, host=host).is_exposed == is_exposed


def test_two_clusters_on_one_data_directory_are_refused(embedded: EmbeddedCluster) -> None:
    with pytest.raises(ConflictError):
        start_embedded(embedded.data_dir, virtual_gpus=1)


def test_the_command_line_finds_a_cluster_by_its_data_directory(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    def cli(*words: str, data_dir: Path = embedded.data_dir) -> Result:
        return CliRunner().invoke(app, [*words, "--data-dir", str(data_dir)])

    with cluster.create_job("shown", job_id="shown") as job:
        job.train_deployment("actor", MODEL).barrier().result()
        assert json.loads(cli("status", "--json").stdout)["gpus"] == 8
        assert json.loads(cli("nodes", "--json").stdout)[0]["gpus_reserved"] >= 1
        assert "shown" in [row["job"] for row in json.loads(cli("jobs", "--json").stdout)]
        assert "actor" in cli("jobs", "shown").stdout
        assert "is ready" in json.loads(cli("logs", "shown", "--json").stdout)[0]["text"]
        assert isinstance(cli("jobs", "nobody").exception, UnknownJobError)
    gone = cli("status", data_dir=tmp_path)
    assert "plexrl up" in str(gone.exception)
