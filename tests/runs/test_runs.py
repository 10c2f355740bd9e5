"""Controllers that run on the cluster: real processes, and `kill -9`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import plexrl
from plexrl.errors import ConflictError, InvalidRequestError, NotFoundError
from plexrl.wire.messages.cluster_views import RunView

COUNTING = """
import sys, time
import plexrl
steps, pause = int(sys.argv[1]), float(sys.argv[2])
with plexrl.connect() as cluster, cluster.create_job("counting") as job:
    actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789"))
    batch = plexrl.Batch([[3, 4, 5]], {"mask": [[0, 1, 1]]})
    first = job.resume_step(actor)
    print("begins at", first, flush=True)
    for step in range(first, steps):
        actor.forward_backward(batch, plexrl.losses.cross_entropy())
        actor.optim_step(learning_rate=0.01).result(120)
        job.log(step + 1, {"step": step + 1})
        print("step", step + 1, flush=True)
        time.sleep(pause)
"""


class Cluster:
    """A cluster of `plexrl up` with runs, and a tenant's connection to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        config = folder / "cluster.toml"
        config.write_text("[router]\nruns_max = 2\n")
        words = ["up", "--config", config, "--data-dir", self.data, "--virtual-gpus", "2"]
        command = [sys.executable, "-m", "plexrl.cli.app", *map(str, words), "--gpus", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.operator = plexrl.connect(data_dir=self.data)
        url = self.operator.url
        self.tenant = plexrl.connect(url, self.operator.create_tenant("lab"))
        self.other = plexrl.connect(url, self.operator.create_tenant("others"))

    def close(self) -> None:
        for connected in (self.tenant, self.other, self.operator):
            connected.close()
        self.process.terminate()
        self.process.communicate()

    def start(self, text: str, *arguments: str, **options: Any) -> str:
        script = self.folder / "script.py"
        script.write_text(text)
        return self.tenant.runs.start(script, arguments, **options)["run"]

    def wait_for(self, run: str, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not what():
            seen = self.tenant.runs.get(run), self.tenant.runs.log(run)
            assert time.monotonic() < deadline, seen
            time.sleep(0.1)

    def end_of(self, run: str) -> RunView:
        self.wait_for(run, lambda: self.state(run) not in ("waiting", "running"))
        return self.tenant.runs.get(run)

    def state(self, run: str) -> str:
        return self.tenant.runs.get(run)["state"]

    def log(self, run: str) -> str:
        return self.tenant.runs.log(run)

    def part(self, module: str) -> psutil.Process:
        (found,) = [
            each
            for each in psutil.Process(self.process.pid).children(recursive=True)
            if module in each.cmdline()
        ]
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("runs"))
    yield made
    made.close()


def test_a_script_runs_with_its_files_and_a_key_that_is_revoked(cluster: Cluster) -> None:
    run = cluster.start(COUNTING, "2", "0")
    assert cluster.end_of(run)["state"] == "completed"
    assert cluster.log(run).splitlines() == ["begins at 0", "step 1", "step 2"]
    assert len(cluster.operator.tenant_keys("lab")) == 1
    assert cluster.tenant.attach_job(run, heartbeat=False).status()["state"] == "COMPLETED"


@pytest.mark.parametrize("module", ["plexrl.runs", "plexrl.router", "plexrl.scheduler"])
def test_a_run_survives_the_kill_of_a_part(cluster: Cluster, module: str) -> None:
    run = cluster.start(COUNTING, "6", "0.5")
    cluster.wait_for(run, lambda: "step 2" in cluster.log(run))
    cluster.part(module).kill()
    assert cluster.end_of(run)["state"] == "completed"
    steps = [line for line in cluster.log(run).splitlines() if line.startswith("step")]
    assert len(set(steps)) == 6, "no step is left out"
    assert len(cluster.operator.tenant_keys("lab")) == 1


def test_a_killed_controller_goes_on_after_its_last_step(cluster: Cluster) -> None:
    run = cluster.start(COUNTING, "5", "0.5")
    cluster.wait_for(run, lambda: "step 2" in cluster.log(run))
    for process in psutil.process_iter(["cmdline", "name"]):
        words, name = process.info["cmdline"] or (), process.info["name"]
        if "/program/script.py" in words and "bwrap" not in name:
            os.kill(process.pid, signal.SIGKILL)
    end = cluster.end_of(run)
    assert (end["state"], end["attempts"]) == ("completed", 2)
    begins = [line for line in cluster.log(run).splitlines() if line.startswith("begins")]
    assert begins[0] == "begins at 0"
    assert int(begins[1].rpartition(" ")[2]) >= 2
    assert cluster.log(run).endswith("step 5")


def test_a_script_that_fails_is_started_again_so_often(cluster: Cluster) -> None:
    run = cluster.start("raise SystemExit(7)", restarts=1)
    end = cluster.end_of(run)
    assert (end["state"], end["attempts"], end["exit_code"]) == ("failed", 2, 7)


def test_a_script_whose_error_ended_its_job_is_not_started_again(cluster: Cluster) -> None:
    run = cluster.start(
        "import plexrl\n"
        "with plexrl.connect() as cluster, cluster.create_job('failing'):\n"
        "    raise RuntimeError('a fault')\n"
    )
    end = cluster.end_of(run)
    assert (end["state"], end["attempts"]) == ("failed", 1)
    assert end["reason"] == "its job has ended: FAILED"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"arguments": ["a\0b"]}, "zero byte"),
        ({"arguments": ["x" * 200_000]}, "too long"),
        ({"files": {f"f{at}": "" for at in range(200)}}, "files: give 100"),
        ({"files": {"../script.py": ""}}, "plain name"),
    ],
)
def test_what_no_program_can_be_started_with_is_refused(
    cluster: Cluster, options: dict[str, Any], why: str
) -> None:
    files = {"a.py": "", **options.get("files", {})}
    body = {"script": "a.py", "arguments": [], **options, "files": files}
    with pytest.raises(InvalidRequestError, match=why):
        cluster.tenant._transport.ask("POST", "/v1/runs", body=body)


def test_two_files_of_one_name_are_refused(cluster: Cluster) -> None:
    other = cluster.folder / "other"
    other.mkdir()
    (other / "script.py").write_text("print(2)")
    with pytest.raises(InvalidRequestError, match="a name of its own"):
        cluster.start("print(1)", files=[other / "script.py"])


def test_a_stopped_run_ends_with_its_job(cluster: Cluster) -> None:
    run = cluster.start(COUNTING, "1000", "0.2")
    cluster.wait_for(run, lambda: "step 1" in cluster.log(run))
    logs = cluster.tenant.attach_job(run, heartbeat=False).logs("controller")
    assert "step 1" in logs[0]["text"]
    cluster.tenant.runs.stop(run)
    assert cluster.end_of(run)["state"] == "stopped"
    assert cluster.tenant.attach_job(run, heartbeat=False).status()["state"] == "CANCELLED"


def test_a_script_is_contained(cluster: Cluster) -> None:
    run = cluster.start(
        f"import os\nprint(os.path.exists({str(cluster.data)!r}), len(os.listdir('/proc')) < 200)\n"
        "try:\n    bytearray(8 << 30)\nexcept MemoryError:\n    print('bounded')\n",
        memory_bytes=1 << 30,
    )
    assert cluster.end_of(run)["state"] == "completed"
    assert cluster.log(run).splitlines() == ["False True", "bounded"]


def test_a_run_is_ended_after_its_time(cluster: Cluster) -> None:
    run = cluster.start("import time\ntime.sleep(600)", wall_s=1)
    end = cluster.end_of(run)
    assert (end["state"], end["reason"]) == ("failed", "it has run for 1 s")


def test_runs_belong_to_their_tenant(cluster: Cluster) -> None:
    run = cluster.start("print(1)")
    cluster.end_of(run)
    with pytest.raises(NotFoundError):
        cluster.other.runs.log(run)
    assert cluster.other.runs.list() == []
    assert run in [each["run"] for each in cluster.operator.runs.list()]


def test_the_operator_s_key_runs_nothing(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequestError, match="use a tenant's key"):
        cluster.operator.runs.start(cluster.folder / "script.py")


def test_a_tenant_has_a_bound_of_runs(cluster: Cluster) -> None:
    waiting = [cluster.start("import time\ntime.sleep(600)") for _ in range(2)]
    with pytest.raises(ConflictError, match="has 2 runs"):
        cluster.start("print(1)")
    for run in waiting:
        cluster.tenant.runs.stop(run)
        assert cluster.end_of(run)["state"] == "stopped"
