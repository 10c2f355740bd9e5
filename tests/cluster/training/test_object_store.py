"""A cluster whose payloads, results, metrics and checkpoints are in a real S3 server. Its second
router has a data directory of its own, as on another machine."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import psutil
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import plexrl
from plexrl import errors
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.process.folders.folders import Folders
from plexrl.statemanager.checkpoint.places.choice import place_at
from plexrl.wire.tensors import decode_body
from tests.cluster.tools import VOCABULARY, some_batch, wait_until
from tests.s3_server import SECRET, S3Server, s3_server

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=9)
STEPS = 3
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment().items():
            patch.setenv(name, value)
        yield running


@contextmanager
def storing(
    server: S3Server, folder: Path, nodes: int, prefix: str = ""
) -> Iterator[EmbeddedCluster]:
    """A cluster whose data are in the object store."""
    running = start_embedded(
        folder,
        nodes=nodes,
        virtual_gpus=2,
        data_url=server.url(f"{prefix}data"),
        checkpoint_url=server.url(f"{prefix}checkpoints"),
    )
    yield running
    running.close()


@pytest.fixture(scope="module")
def stored(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Of two nodes."""
    with storing(server, tmp_path_factory.mktemp("stored"), 2) as running:
        yield running


@pytest.fixture(scope="module")
def small(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Of one node."""
    with storing(server, tmp_path_factory.mktemp("small"), 1, "small/") as running:
        yield running


@pytest.fixture(scope="module")
def elsewhere(
    server: S3Server, small: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a router that shares no folder with the others."""
    folder = tmp_path_factory.mktemp("elsewhere")
    config = {
        "router": "elsewhere",
        "scheduler": [f"unix:{Folders.of(small.data_dir).run / 'scheduler.sock'}"],
        "host": "127.0.0.1",
        "port": 0,
        "data_dir": str(folder / "data"),
        "data_url": server.url("small/data"),
        "checkpoint_url": server.url("small/checkpoints"),
    }
    path = folder / "router.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "plexrl.router", "--config", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield f"http://{ready['host']}:{ready['port']}"
        process.terminate()


@pytest.fixture
def cluster(stored: EmbeddedCluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(stored.url, stored.api_key) as connected:
        yield connected


def train(cluster: plexrl.Cluster, name: str) -> tuple[plexrl.Job, plexrl.TrainDeployment]:
    """Some steps on two ranks, on two nodes where there are two."""
    job = cluster.create_job(name)
    actor = job.train_deployment("actor", MODEL, workers=2)
    for step in range(STEPS):
        actor.forward_backward(some_batch(step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-2)
    return job, actor


def files_of(path: str) -> dict[str, bytes]:
    """The files of a checkpoint, without its manifest."""
    place = place_at(path)
    found = {file.path: place.read_range(file, 0, file.nbytes) for file in place.files()}
    del found["checkpoint.json"]
    return found


@pytest.mark.parametrize(
    ("direction", "rows_max"),
    [
        # The largest payload is a file; with 60 000 rows the result is one, too.
        ("here to there", 16_000),
        pytest.param("here to there", 60_000, marks=pytest.mark.slow),
        pytest.param("there to here", 60_000, marks=pytest.mark.slow),
    ],
)
def test_what_one_router_accepts_any_router_executes_and_answers(
    small: EmbeddedCluster, elsewhere: str, direction: str, rows_max: int
) -> None:
    urls = (small.url, elsewhere) if direction == "here to there" else (elsewhere, small.url)
    headers = {"Authorization": f"Bearer {small.api_key}"}
    with (
        plexrl.connect(urls[0], small.api_key) as cluster,
        httpx.Client(base_url=urls[1], headers=headers, timeout=LIMIT_S) as other,
        cluster.create_job("two-routers") as job,
    ):
        reference = job.reference_deployment("reference", MODEL)
        # The scheduler gives runs to both routers.
        batches = [some_batch(seed, rows) for seed, rows in enumerate([4, 5, 6, 7, rows_max])]
        futures = [reference.forward(batch) for batch in batches]
        for future in futures:
            path = f"/v1/operations/{quote(future.operation, safe='')}"
            while (answer := other.get(path, params={"wait_s": 20})).status_code == 202:
                continue
            answer.raise_for_status()
            arrays = decode_body(answer.content)[1]
            assert (arrays["logprobs"] == np.concatenate(future.result(LIMIT_S).logprobs)).all()
        job.log(1, {"loss": 1.0})
        rows = f"/v1/jobs/{job.job}/metrics"
        other.post(rows, json={"step": 2, "values": {"loss": 0.5}}).raise_for_status()
        job.log(3, {"loss": 0.25})
        assert [row["step"] for row in job.metrics()] == [1, 2, 3]
        assert [row["step"] for row in other.get(rows).json()["rows"]] == [1, 2, 3]


@pytest.mark.slow
def test_a_job_trains_to_the_same_bits_as_on_directories(
    cluster: plexrl.Cluster, stored: EmbeddedCluster, server: S3Server, tmp_path: Path
) -> None:
    job, actor = train(cluster, "stored")
    saved = actor.save_checkpoint("end").result(LIMIT_S)
    assert saved["path"] == f"{server.url('checkpoints')}/{job.job}/end"
    running = start_embedded(tmp_path / "local", nodes=2, virtual_gpus=2)
    try:
        with plexrl.connect(running.url, running.api_key) as local:
            other, twin = train(local, "stored")
            path = twin.save_checkpoint("end").result(LIMIT_S)["path"]
            assert files_of(saved["path"]) == files_of(path)
            other.finish()
    finally:
        running.close()

    # The checkpoint is listed, downloaded, loaded, a start for another model, and deleted.
    assert [(each["name"], each["path"]) for each in job.checkpoints()] == [("end", saved["path"])]
    folder = job.download_checkpoint("end", tmp_path / "downloaded")
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 10_000
    assert {file.name for file in folder.iterdir()} >= {"config.json", "tokenizer.json"}
    with pytest.raises(errors.InvalidRequestError, match="exists"):
        job.download_checkpoint("end", folder)
    command = ["checkpoints", "download", job.job, "end", str(tmp_path / "by-command")]
    environment = {"PLEXRL_URL": stored.url, "PLEXRL_API_KEY": stored.api_key}
    done = CliRunner().invoke(app, command, env=environment)
    assert done.exit_code == 0, done.output
    assert {file.name for file in (tmp_path / "by-command").iterdir()} == {
        file.name for file in folder.iterdir()
    }
    actor.forward_backward(some_batch(7), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2)
    actor.load_checkpoint("end").result(LIMIT_S)
    again = actor.save_checkpoint("again").result(LIMIT_S)
    assert files_of(again["path"]) == files_of(saved["path"])

    start = plexrl.ModelSpec(path=saved["path"])
    resumed = job.train_deployment("resumed", start)
    first = resumed.save_checkpoint("first", format="hf").result(LIMIT_S)
    wanted = files_of(saved["path"])["model.safetensors"]
    assert files_of(first["path"])["model.safetensors"] == wanted
    with pytest.raises(errors.InvalidRequestError, match="not a checkpoint"):
        job.train_deployment("stranger", plexrl.ModelSpec(path="s3://plexrl/data/x"))

    job.delete_checkpoint("end")
    with pytest.raises(errors.CheckpointNotFoundError):
        job.delete_checkpoint("end")
    assert [each["name"] for each in job.checkpoints()] == ["again", "first"]
    assert not server.files(f"checkpoints/{job.job}/end")
    job.finish()


@pytest.mark.slow
def test_an_outage_of_the_store_delays_and_loses_nothing(
    cluster: plexrl.Cluster, server: S3Server
) -> None:
    job, actor = train(cluster, "calm")
    calm = files_of(actor.save_checkpoint("end").result(LIMIT_S)["path"])
    job.finish()
    outages = threading.Event()

    def break_it() -> None:
        for _ in range(3):
            time.sleep(1.0)
            server.kill()
            time.sleep(4.0)
            server.start()
        outages.set()

    job, actor = train(cluster, "stormy")
    breaking = threading.Thread(target=break_it)
    breaking.start()
    names: list[str] = []
    while not outages.is_set():
        # The client repeats what the routers refuse meanwhile.
        actor.forward(some_batch(1, rows=30_000)).result(LIMIT_S)
        names.append(f"c{len(names)}")
        actor.save_checkpoint(names[-1]).result(LIMIT_S)
    breaking.join()
    end = actor.save_checkpoint("end").result(LIMIT_S)
    assert files_of(end["path"]) == calm
    wait_until(
        lambda: {each["name"] for each in job.checkpoints()} == {*names, "end"}, "one is missing"
    )
    for each in job.checkpoints():
        assert files_of(each["path"])["model.safetensors"] == calm["model.safetensors"]
    assert actor.status()["incarnation"] == 1
    job.finish()


def test_credentials_are_not_in_the_arguments_of_processes(small: EmbeddedCluster) -> None:
    supervisor = psutil.Process(small.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    words: list[str] = []
    for process in processes:
        # A process that ends meanwhile has no arguments.
        with suppress(psutil.NoSuchProcess):
            words += process.cmdline()
    arguments = " ".join(words)
    assert "plexrl.router" in arguments
    assert SECRET not in arguments
