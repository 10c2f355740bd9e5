"""Output and effect of every command for live clusters, for people and for programs."""

import csv
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.commands.command_walk import MARK, run
from tests.cluster.tools import VOCABULARY, some_batch, wait_until

TENANT = "a-tenant-whose-name-is-rather-long"
NAME = "a-sweep-over-learning-rates-and-batch-sizes-lr1e-4-batch256"
WIDTH = 80
ROWS = 30
METRICS = {"reward/mean": 0.5, "loss": 1.25, "grad_norm": 123.456, "kl": 1e-5}
METRICS |= {"tokens/mean_length_of_responses": 201.0, "tokens/truncated_part": 0.01}
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


@dataclass(frozen=True)
class Scene:
    """A cluster with at least one row in every table."""

    cluster: EmbeddedCluster
    tenant: plexrl.Cluster
    job: plexrl.Job
    waiting: plexrl.Job
    ended: plexrl.Job


@pytest.fixture(scope="module")
def scene(embedded: EmbeddedCluster) -> Iterator[Scene]:
    with plexrl.connect(embedded.url, embedded.api_key) as operator:
        for left in operator.jobs():
            operator.attach_job(left["job"], heartbeat=False).finish("cancelled")
        key = operator.create_tenant(TENANT)
    with plexrl.connect(embedded.url, key) as tenant:
        ended = tenant.create_job("ended")
        ended.finish("failed", "the controller said so")
        job = tenant.create_job(NAME)
        actor = job.train_deployment("actor", MODEL, exclusive=True)
        rollout = job.rollout_deployment("rollout", MODEL)
        for step in range(ROWS):
            job.log(step, {name: value * (step + 1) for name, value in METRICS.items()})
        actor.forward_backward(some_batch(1), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-3).result(120)
        actor.save_checkpoint("step-00001").result(120)
        rollout.generate([[3, 4, 5]]).result(120)
        with pytest.raises(plexrl.errors.CheckpointNotFoundError):
            actor.load_checkpoint("a-checkpoint-that-was-never-saved").result(120)
        waiting = tenant.create_job("waiting")
        waiting.train_deployment("actor", MODEL, workers=8, exclusive=True).barrier()
        yield Scene(embedded, tenant, job, waiting, ended)
        for each in (job, waiting):
            each.finish("cancelled")


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this variable, output outside a terminal has no width."""
    monkeypatch.delenv("COLUMNS", raising=False)


def commands(scene: Scene) -> list[list[str]]:
    """All commands that show a live cluster."""
    job = scene.job.job
    return [
        ["status"],
        ["jobs"],
        ["jobs", "--all"],
        ["jobs", "--state", "failed"],
        ["jobs", job],
        ["explain", job],
        ["explain", scene.waiting.job],
        ["operations", job],
        ["metrics", job],
        ["metrics", job, "-m", "reward/*", "--last", "3"],
        ["checkpoints"],
        ["checkpoints", job],
        ["usage"],
        ["usage", "--by", "tenant"],
        ["usage", "--by", "kind"],
        ["usage", "--by", "user"],
        ["audit", "--limit", "5"],
        ["keys", "whoami"],
        ["nodes"],
        ["groups"],
        ["tenants", "list"],
        ["keys", "list", TENANT],
        ["keys", "create", TENANT],
        ["tenants", "set", TENANT, "--weight", "2"],
        ["nodes", "undrain", "node0"],
        ["explain", "no-such-job"],
        ["cancel", scene.ended.job],
        ["checkpoints", "delete", job, "no-such-checkpoint"],
        ["--help"],
        ["checkpoints", "--help"],
    ]


def environment(scene: Scene) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    for name in ("PLEXRL_URL", "PYTHONUNBUFFERED"):
        kept.pop(name, None)
    return {**kept, "PLEXRL_DATA_DIR": str(scene.cluster.data_dir)}


def walk(scene: Scene) -> list[str]:
    module = "tests.cluster.commands.command_walk"
    return [sys.executable, "-m", module, json.dumps(commands(scene))]


def at_a_terminal(scene: Scene) -> str:
    """Output of the commands on a terminal of 80 by 24."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    process = subprocess.Popen(
        walk(scene), stdin=theirs, stdout=theirs, stderr=theirs, env=environment(scene)
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 1 << 16)
        except OSError:
            # The terminal is closed when its last process ends.
            break
        shown += more
    os.close(ours)
    assert process.wait(60) == 0
    return shown.decode().replace("\r\n", "\n")


def by_command(shown: str) -> dict[str, str]:
    """Each command's output."""
    found = {}
    for part in shown.split(MARK)[1:]:
        first, _, rest = part.partition("\n")
        if not first.startswith("ended"):
            found[first] = rest
    return found


def cli(scene: Scene, *words: str, ends_with: int = 0) -> str:
    """Output of one command without a terminal, standard error included."""
    output = io.StringIO()
    where = ("--data-dir", str(scene.cluster.data_dir))
    with redirect_stdout(output), redirect_stderr(output):
        code = run((*words, *where))
    assert code == ends_with, output.getvalue()
    return output.getvalue()


def test_no_word_is_broken_on_a_terminal_of_80_columns(scene: Scene) -> None:
    shown = by_command(at_a_terminal(scene))
    assert len(shown) == len(commands(scene))
    for command, text in shown.items():
        assert "\x1b" not in text
        # "COMMAND [ARGS]..." in the help is not a truncation.
        assert "…" not in text
        for line in text.splitlines():
            fits = cell_len(line) <= WIDTH
            assert fits or " " not in line.strip().rpartition("  ")[2], f"{command}: {line!r}"
    for command in ("jobs", "usage", "checkpoints"):
        assert scene.job.job in shown[command].split(), command
    assert TENANT in shown["tenants list"].split()
    assert f"{scene.job.job}/actor" in shown["groups"].split()
    assert "▁" in shown[f"metrics {scene.job.job}"], "a trend for people"


def test_programs_get_plain_rows_of_equal_columns(scene: Scene) -> None:
    done = subprocess.run(
        walk(scene),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        env=environment(scene),
    )
    shown = by_command(done.stdout.decode())
    for command, text in shown.items():
        for line in text.splitlines():
            assert not re.search("[\u2500-\u259f\x1b…]", line), f"{command}: {line!r}"
            assert line == line.rstrip() or "help" in command, f"{command}: {line!r}"
    tables = ("nodes", "groups", "keys list " + TENANT, "operations " + scene.job.job)
    for command in (*tables, "checkpoints", f"metrics {scene.job.job}"):
        lines = [line for line in shown[command].splitlines() if line and line[0] not in "#"]
        counts = {len(re.split(" {2,}", line)) for line in lines}
        assert len(counts) == 1, f"{command}: {lines}"
    (row,) = [
        line.split() for line in shown["jobs"].splitlines() if line.startswith(scene.job.job + " ")
    ]
    assert row[:2] == [scene.job.job, TENANT]
    assert len(shown[f"metrics {scene.job.job}"].splitlines()) == 1 + 20


def test_a_job_is_found_by_the_beginning_of_its_id_and_by_its_name(scene: Scene) -> None:
    for text in (scene.job.job, scene.job.job[:20], NAME):
        assert json.loads(cli(scene, "jobs", text, "--json"))["job"] == scene.job.job
    output = cli(scene, "logs", "no-such", ends_with=1)
    assert "there is no job 'no-such'" in output
    assert "plexrl jobs --all" in output
    twins = [scene.tenant.create_job("twin") for _ in range(2)]
    output = cli(scene, "explain", "twin", ends_with=1)
    assert all(twin.job in output for twin in twins)
    twins[0].finish()
    assert json.loads(cli(scene, "jobs", "twin", "--json"))["job"] == twins[1].job
    twins[1].finish()


def test_jobs_that_have_ended_are_listed_when_asked_for(scene: Scene) -> None:
    def listed(*words: str) -> set[str]:
        return {each["job"] for each in json.loads(cli(scene, "jobs", *words, "--json"))}

    assert {scene.job.job, scene.waiting.job} <= listed()
    assert scene.ended.job not in listed()
    assert {scene.ended.job, scene.job.job} <= listed("--all")
    assert scene.ended.job in listed("--state", "FAILED")
    assert listed("--state", "queued") == {scene.waiting.job}
    assert "--state takes queued" in cli(scene, "jobs", "--state", "happy", ends_with=1)


def test_cancel_ends_jobs_and_reports_each_outcome(scene: Scene) -> None:
    first, second = (scene.tenant.create_job(f"doomed{number}") for number in range(2))
    output = cli(scene, "cancel", first.job, "no-such-job", ends_with=1)
    assert "there is no job 'no-such-job'" in output
    assert first.status()["state"] == "QUEUED", "a job that is not there stops all of it"
    first.train_deployment("actor", MODEL).barrier().result(120)
    output = cli(scene, "cancel", first.job, scene.ended.job, "doomed1", ends_with=1)
    assert f"{first.job} is cancelled: 0 operations end unfinished, it releases 1 GPU." in output
    assert f"job {scene.ended.job!r} has ended (failed): there is nothing to cancel" in output
    for job in (first, second):
        view = job.status()
        assert (view["state"], view["reason"]) == ("CANCELLED", "plexrl cancel")
    third = scene.tenant.create_job("doomed2")
    output = cli(
        scene, "cancel", third.job, scene.ended.job, "--reason", "no", "--json", ends_with=1
    )
    cancelled, refused = json.loads(output)
    assert (cancelled["job"], cancelled["state"]) == (third.job, "CANCELLED")
    assert (refused["job"], refused["error"]["code"]) == (scene.ended.job, "job_ended")
    assert third.status()["reason"] == "no"


def test_metrics_are_shown_as_rows_csv_json_and_a_plot(scene: Scene, tmp_path: Path) -> None:
    job = scene.job.job
    rows = json.loads(cli(scene, "metrics", job, "--last", "2", "-m", "loss", "--json"))
    assert [(row["step"], row["values"]) for row in rows] == [
        (step, {"loss": 1.25 * (step + 1)}) for step in (ROWS - 2, ROWS - 1)
    ]
    whole = list(csv.DictReader(io.StringIO(cli(scene, "metrics", job, "--all", "--csv"))))
    assert [int(row["step"]) for row in whole] == list(range(ROWS))
    assert float(whole[3]["tokens/truncated_part"]) == 0.04
    plot = tmp_path / "metrics.png"
    assert f"{ROWS} rows are drawn" in cli(scene, "metrics", job, "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "name it *.png" in cli(scene, "metrics", job, "--plot", "plot.txt", ends_with=1)
    output = cli(scene, "metrics", job, "-m", "nothing", ends_with=1)
    assert "no metric 'nothing'" in output
    assert "grad_norm" in output
    assert "has logged nothing" in cli(scene, "metrics", scene.waiting.job)


def test_metrics_are_followed_until_the_job_has_ended(scene: Scene) -> None:
    job = scene.tenant.create_job("followed")
    job.log(0, {"loss": 2.0, "kl": 0.1})
    command = [sys.executable, "-m", "plexrl.cli.app", "metrics", job.job, "-f", "-m", "loss"]
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, text=True, env=environment(scene)
    ) as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["values"] == {"loss": 2.0}
        job.log(1, {"loss": 1.0, "kl": 0.2})
        assert json.loads(following.stdout.readline())["values"] == {"loss": 1.0}
        job.finish()
        assert following.stdout.read() == ""
        assert following.wait(60) == 0
    assert "loss=1" in cli(scene, "metrics", job.job, "--follow").splitlines()[1]


def test_checkpoints_are_listed_and_deleted(scene: Scene) -> None:
    job = scene.tenant.create_job("saves")
    actor = job.train_deployment("actor", MODEL)
    for name in ("one", "two"):
        actor.save_checkpoint(name, step=7).result(120)
    listed = json.loads(cli(scene, "checkpoints", "saves", "--json"))
    assert [(each["name"], each["state"], each["step"]) for each in listed] == [
        ("one", "durable", 7),
        ("two", "durable", 7),
    ]
    everybodys = json.loads(cli(scene, "checkpoints", "--json"))
    assert {job.job, scene.job.job} <= {each["job"] for each in everybodys}
    output = cli(scene, "checkpoints", "delete", job.job, "one", "three", ends_with=1)
    assert "no checkpoint 'three'; it has one, two" in output
    assert "one is deleted" in cli(scene, "checkpoints", "delete", job.job, "one")
    assert not Path(listed[0]["path"]).exists()
    assert [each["name"] for each in job.checkpoints()] == ["two"]
    job.finish()


def test_a_waiting_job_shows_the_idle_job_that_holds_the_gpus(scene: Scene) -> None:
    def holders() -> list[dict[str, Any]]:
        return list(json.loads(cli(scene, "explain", scene.waiting.job, "--json"))["holders"])

    # The workers of jobs that have just ended may still run.
    wait_until(lambda: len(holders()) == 1, "ended jobs hold GPUs")
    rows = holders()
    assert [(row["job"], row["tenant"], row["gpus"]) for row in rows] == [
        (scene.job.job, TENANT, 2)
    ]
    assert rows[0]["condition"] == "idle"
    output = cli(scene, "explain", scene.waiting.job)
    _, _, table = output.partition("Who has the GPUs")
    assert re.search(rf"^{scene.job.job} +{TENANT} +2 +idle ", table, re.MULTILINE)


def test_usage_shows_what_sharing_saved(scene: Scene) -> None:
    rows = json.loads(cli(scene, "usage", "--json"))
    (own,) = [row for row in rows if row["job"] == scene.job.job]
    assert own["held_gpu_hours"] > 0
    assert own["saved_gpu_hours"] == own["isolated_gpu_hours"] - own["held_gpu_hours"] == 0
    as_csv = list(csv.DictReader(io.StringIO(cli(scene, "usage", "--by", "tenant", "--csv"))))
    assert all({"isolated_gpu_hours", "saved_gpu_hours"} <= row.keys() for row in as_csv)
    assert "Sharing saved " in cli(scene, "usage")
    assert "saved" not in cli(scene, "usage", "--by", "kind")


def test_status_counts_switches_of_jobs_that_have_ended(scene: Scene) -> None:
    def switches() -> int:
        return int(json.loads(cli(scene, "status", "--json"))["context_switches"])

    before = switches()
    jobs = [scene.tenant.create_job("turns") for _ in range(2)]
    actors = [job.train_deployment("actor", MODEL) for job in jobs]
    for actor in (*actors, *actors):
        actor.barrier().result(120)
    counted = switches()
    for job in jobs:
        job.finish()
    assert switches() >= counted
    assert counted > before
