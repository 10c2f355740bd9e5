"""The Containerfiles of `deploy/images`: their steps on a root file system of Debian, and each part
of a cluster in what they make, as a user without a name, from a read-only root."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.images.containerfile import Image, build
from tests.free_ports import free_port
from tests.hosts.host import REPOSITORY

IMAGES = REPOSITORY / "deploy" / "images"
RELEASE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates,tini"
TORCH = "torch==2.13.0"
CONTROL = "server,tinker,postgres,s3,kubernetes,mqtt,text"
NODE = "worker,s3,kubernetes,megatron"
ALONE = ("--no-build-isolation", TORCH, "deepspeed>=0.19,<0.20")
BUILD = ("pip>=25", "hatchling", "hatch-mypyc", "setuptools", "wheel", "ninja")
USER = 54_321
"""No account has this number."""
KEY = "plx-operator-of-the-images-test"
GIB = 1 << 30
PACKAGES_MB = {"control": 450, "node": 1600}
"""Bounds on what images add to their base, torch without CUDA; `docs/kubernetes.md` has both."""
START_S = 240.0
CONTROLLER = """
import os
import plexrl
model = plexrl.tiny_qwen2("0123456789=", seed=1)
with plexrl.connect() as cluster, cluster.create_job("smoke") as job:
    rollout = job.rollout_deployment("rollout", model)
    actors = [
        job.train_deployment(f"actor-{backend}", model, backend=backend)
        for backend in os.environ["BACKENDS"].split(",")
    ]
    for number, actor in enumerate(actors):
        samples = rollout.generate([[1, 2, 3]], n=4).result().samples
        batch = plexrl.Batch.from_samples([[1, 2, 3]], samples, [[1.0, -1.0, 0.5, -0.5]])
        actor.forward_backward(batch, plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-3)
        rollout.sync_weights(actor)
        print("trained", actor.save_checkpoint(f"end-{number}").result()["path"], flush=True)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    missing = [name for name in ("debootstrap", "bwrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("packages are fetched for this Python, and the images have 3.11")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with Python, in place of the image that the Containerfiles begin with."""
    root = tmp_path_factory.mktemp("base") / "root"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return root


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages of both images, fetched beforehand: steps have no network."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    # DeepSpeed tells its requirements only where torch is.
    for wanted in ([*BUILD, TORCH, f"{REPOSITORY}[{CONTROL},{NODE}]"], ALONE):
        done = subprocess.run(
            [*command, *wanted],
            env={**os.environ, "DS_BUILD_OPS": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


def made(kind: str, extras: str, base: Path, wheels: Path, folder: Path) -> Image:
    options = {"PIP_OPTIONS": "--no-index --find-links=/wheels", "EXTRAS": extras, "TORCH": TORCH}
    return build(IMAGES / f"Containerfile.{kind}", base, folder, arguments=options, wheels=wheels)


@pytest.fixture(scope="module")
def control(base: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return made("control", CONTROL, base, wheels, tmp_path_factory.mktemp("control"))


@pytest.fixture(scope="module")
def node(base: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return made("node", f"{NODE},deepspeed", base, wheels, tmp_path_factory.mktemp("node"))


class Pods:
    """Containers of one cluster, which share two folders of this machine and its network."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.run, self.data = folder / "run", folder / "data"
        for each in (self.run, self.data):
            each.mkdir()
            os.chown(each, USER, USER)

    def start(
        self, image: Image, name: str, words: list[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Start `words` in a container, as the user of this test's processes."""
        writable = {self.run: "/run/plexrl", self.data: "/var/lib/plexrl"}
        command = image.command(
            words, user=USER, writable=writable, environment={"OMP_NUM_THREADS": "1", **environment}
        )
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def part(self, image: Image, name: str, words: list[str], config: object) -> None:
        """Start a part with its configuration."""
        path = self.run / f"{name}.json"
        path.write_text(json.dumps(config))
        os.chown(path, USER, USER)
        self.start(image, name, [*words, f"--config=/run/plexrl/{name}.json"], {})

    def text(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()


def start_cluster(pods: Pods, control: Image, node: Image, port: int) -> None:
    """All parts, as the chart starts them but for its certificates: on Unix sockets."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    for name, content in (("ticket.key", bytes(32)), ("operator.key", KEY.encode())):
        path = pods.run / name
        path.write_bytes(content)
        path.chmod(0o600)
        os.chown(path, USER, USER)
    entry = list(control.entrypoint)
    python = [*entry[: entry.index("-m")], "-m"]
    scheduler = {
        "listen": ["unix:/run/plexrl/scheduler.sock"],
        "journal": "/var/lib/plexrl/journal.sqlite",
        "operator_key_digest": digest,
    }
    pods.part(control, "scheduler", [*python, "plexrl.scheduler"], scheduler)
    router = {
        "router": "router-0",
        "scheduler": ["unix:/run/plexrl/scheduler.sock"],
        "rollout": "unix:/run/plexrl/rollout.sock",
        "host": "127.0.0.1",
        "port": port,
        "data_dir": "/var/lib/plexrl/router",
    }
    pods.part(control, "router", [*python, "plexrl.router"], router)
    rollout = {
        "listen": ["unix:/run/plexrl/rollout.sock"],
        "routers": [f"http://127.0.0.1:{port}"],
        "data_dir": "/var/lib/plexrl/rollout",
        "operator_key_file": "/run/plexrl/operator.key",
    }
    pods.part(control, "rollout", [*python, "plexrl.rollout"], rollout)
    statemanager = {
        "node": "node-1",
        "listen": "/run/plexrl/sm.sock",
        "host_dir": "/var/lib/plexrl/host",
        "host_bytes": 256 << 20,
        "nvme_dir": "/var/lib/plexrl/nvme",
        "nvme_bytes": GIB,
        "checkpoint_url": "/var/lib/plexrl/router/checkpoints",
        "ticket_key_file": "/run/plexrl/ticket.key",
    }
    agent = {
        "node": "node-1",
        "scheduler": ["unix:/run/plexrl/scheduler.sock"],
        "statemanager": "/run/plexrl/sm.sock",
        "ticket_key_file": "/run/plexrl/ticket.key",
        "gpus": 4,
        "gpu_memory_bytes": GIB,
        "host_memory_bytes": 256 << 20,
        "nvme_bytes": GIB,
        "run_dir": "/run/plexrl/node",
        "rendezvous_dir": "/run/plexrl/node",
        "data_dir": "/var/lib/plexrl/node",
        "checkpoint_url": "/var/lib/plexrl/router/checkpoints",
    }
    settings = {"statemanager": statemanager, "agent": agent}
    pods.part(node, "node", [*node.entrypoint, "node"], settings)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with ExitStack() as stack:
        yield Pods(tmp_path, stack)


@pytest.mark.parametrize("kind", ["control", "node"])
def test_an_image_has_no_pip_and_names_a_user_that_is_not_root(
    kind: str, request: pytest.FixtureRequest
) -> None:
    image: Image = request.getfixturevalue(kind)
    assert image.user == "10001:10001"
    assert not list(image.root.glob("opt/plexrl/lib/python3*/site-packages/pip"))
    size = sum(file.lstat().st_size for file in (image.root / "opt").rglob("*") if file.is_file())
    assert size < PACKAGES_MB[kind] * 1e6


@pytest.mark.parametrize("command", ["keys", "issuer", "certificate", "settings", "operator"])
def test_commands_that_need_kubernetes_load_all_that_they_import(
    command: str, control: Image, pods: Pods
) -> None:
    process = pods.start(control, command, [*control.entrypoint, command, "--help"], {})
    assert process.wait(60) == 0, pods.text(command)


def test_every_part_runs_and_trains_as_a_user_without_a_name(
    control: Image, node: Image, pods: Pods
) -> None:
    port = free_port()
    start_cluster(pods, control, node, port)
    environment = {
        "PLEXRL_URL": f"http://127.0.0.1:{port}",
        "PLEXRL_API_KEY": KEY,
        "BACKENDS": "fsdp,megatron,deepspeed",
    }
    ready = pods.run / "node" / "ready"
    deadline = time.monotonic() + START_S
    while not ready.exists():
        assert time.monotonic() < deadline, pods.text("node") + pods.text("scheduler")
        time.sleep(0.2)
    controller = pods.start(control, "controller", ["python", "-c", CONTROLLER], environment)
    status = controller.wait(600)
    said = pods.text("controller")
    assert status == 0, said + pods.text("router") + pods.text("node")
    assert said.count("trained /") == 3
