"""The rollout service as a part of a cluster: when it starts, and what is seen of its rollouts."""

import itertools
import json
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from tests.cluster.rollouts.test_asynchronous_rollouts import MODEL, SAMPLING, check, run
from tests.cluster.tools import process_of

SERVICE = "plexrl.rollout"


def parts(embedded: EmbeddedCluster) -> str:
    return "\n".join(" ".join(p.cmdline()) for p in psutil.Process(embedded.pid).children())


@pytest.mark.slow
def test_the_service_starts_with_the_first_rollout_and_its_rollouts_are_seen(
    cluster: plexrl.Cluster, embedded: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLEXRL_URL", embedded.url)
    monkeypatch.setenv("PLEXRL_API_KEY", embedded.api_key)
    monkeypatch.setenv("COLUMNS", "80")

    def command(*words: str) -> str:
        done = CliRunner().invoke(app, ["rollouts", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert cluster.rollouts() == []
    assert json.loads(command("--json")) == []
    key = cluster.create_tenant("viewer")
    with cluster.create_job("seen") as job, plexrl.connect(embedded.url, key) as other:
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout(
            *("rollout", MODEL, actor),
            instances=2,
            policy=plexrl.BoundedStaleness(1),
            prompts=2,
            samples=2,
            sampling=SAMPLING,
        )
        rows = ([3 + number % 10, 4] for number in itertools.count())
        for batch in rollout.batches(rows, lambda _, sample: float(len(sample.tokens)), steps=3):
            train = plexrl.Batch.from_samples(batch.prompts, batch.samples, batch.rewards)
            actor.forward_backward(train, plexrl.losses.importance_sampling())
            actor.optim_step(learning_rate=1e-3)
        assert process_of(embedded, SERVICE).is_running()
        (view,) = cluster.rollouts(job.job)
        assert view["job"] == job.job
        assert (view["staleness"], view["state"], view["failure"]) == (1, "running", None)
        assert sum(view["staleness_seen"].values()) >= 2 * 4
        assert set(view["staleness_seen"]) <= {"0", "1"}
        assert [each["job"] for each in cluster.rollouts()] == [job.job]
        # A tenant sees its own jobs.
        assert other.rollouts() == []
        with pytest.raises(plexrl.errors.UnknownJobError):
            other.rollouts(job.job)
        shown = command(job.job)
        assert max(map(len, shown.splitlines())) <= 80
        for text in ("rollout-0", "rollout-1", "running", "in", "flight"):
            assert text in shown
        text = httpx.get(f"{embedded.url}/v1/metrics").text
        assert "plexrl_rollout_service_connected 1.0" in text
        assert 'plexrl_rollouts{state="running"} 1.0' in text
        assert job.job not in text


@pytest.mark.slow
def test_a_restarted_cluster_starts_the_service_for_the_rollouts_that_it_has(
    tmp_path: Path,
) -> None:
    running = [start_embedded(tmp_path / "data", virtual_gpus=4)]
    try:
        with plexrl.connect(running[0].url, running[0].api_key) as cluster:
            assert SERVICE not in parts(running[0]), "nobody needs the service yet"

            def restart(version: int, _: plexrl.BoundedRollout) -> None:
                if version == 3:
                    assert SERVICE in parts(running[0])
                    running[0].close()
                    running.append(start_embedded(tmp_path / "data", virtual_gpus=4))

            with cluster.create_job("restarted") as job:
                batches, _ = run(job, 1, 6, restart)
            assert len(running) == 2
            assert [each.version for each in batches] == list(range(6))
            check(batches, 1)
    finally:
        running[-1].close()
