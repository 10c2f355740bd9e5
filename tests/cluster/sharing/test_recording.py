"""The history of a live cluster becomes a trace."""

import json
from pathlib import Path

from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.traces import read_jobs
from tests.cluster.tools import VOCABULARY, some_batch

CYCLES = 3


def test_a_jobs_operations_are_recorded(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    sampling = plexrl.SamplingParams(max_tokens=8, seed=3)
    with cluster.create_job("recorded") as job:
        actor = job.train_deployment("actor", model)
        rollout = job.rollout_deployment("rollout", model)
        for cycle in range(CYCLES):
            rollout.generate([[3, 4, 5]], sampling=sampling).result(120)
            batch = some_batch(cycle)
            actor.forward(batch).result(120)
            actor.forward_backward(batch, plexrl.losses.grpo())
            actor.optim_step(learning_rate=1e-3).result(120)
            rollout.sync_weights(actor).result(120)
    out = tmp_path / "live.parquet"
    where = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}
    result = CliRunner().invoke(app, ["traces", "record", str(out), "--json"], env=where)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] >= 1
    [row] = [each for each in read_jobs(out) if each.job_id == job.job]
    assert (row.cycles, row.gpus, row.rollout_gpus) == (CYCLES, 1, 1)
    assert row.outcome == "completed"
    assert row.period_s is not None
    functions = [segment.function for segment in row.segments]
    assert functions[0] == "log_prob"
    assert functions[-1] == "sync"
    assert "update" in functions
    rows = [
        each
        for each in job.operations()
        if each["deployment"] == actor.deployment and each["kind"] == "forward"
    ]
    assert len(rows) == CYCLES
    starts = [each["started_at"] or 0.0 for each in rows]
    assert row.service_s >= 0.9 * (starts[-1] - starts[0]) - (row.wait_s or 0)
    history = tmp_path / "live.json"
    result = CliRunner().invoke(app, ["traces", "record", str(history), "--json"], env=where)
    assert result.exit_code == 0, result.output
    command = ["fidelity", str(history), "--warm-up", "1", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    groups = json.loads(result.stdout)["groups"]
    [(group, found)] = [
        (group, each)
        for group in groups
        for each in group["jobs"]
        if each["job"].startswith("recorded")
    ]
    assert group["group"] == rows[0]["group"]
    assert found["cycles"] == CYCLES - 1
    for name in ("measured_s", "predicted_s"):
        assert 0.0 < found[name]["median"] <= found[name]["p95"]
