"""Asynchronous rollouts as operators and tenants see them: commands, routes, metrics."""

import itertools
import json

import httpx
import psutil
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.rollouts.test_asynchronous_rollouts import MODEL, SAMPLING
from tests.cluster.tools import process_of

ENDED = "plexrl.rollout"


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
        rollout = job.asynchronous_rollout(
            *("rollout", MODEL, actor),
            instances=2,
            staleness=1,
            prompts=2,
            samples=2,
            sampling=SAMPLING,
        )
        rows = ([3 + number % 10, 4] for number in itertools.count())
        for batch in rollout.batches(rows, lambda _, sample: float(len(sample.tokens)), steps=3):
            train = plexrl.Batch.from_samples(batch.prompts, batch.samples, batch.rewards)
            actor.forward_backward(train, plexrl.losses.importance_sampling())
            actor.optim_step(learning_rate=1e-3)
        assert process_of(embedded, ENDED).is_running()
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
