"""The commands of the SDK (`tinker run`, `checkpoint`, `session`) against a cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.router.tinker.clients import LIMIT_S, ROWS, Tenant, prompt, supervised
from tests.router.tinker.messages.test_perfetto import slices_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def tinker_command(tenant: Tenant, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tinker.cli", "--format", "json", *words]
    env = {**os.environ, "TINKER_BASE_URL": tenant.url, "TINKER_API_KEY": tenant.key}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def told(tenant: Tenant, *words: str) -> Any:
    """What a command writes as JSON."""
    ended = tinker_command(tenant, *words)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_runs_and_checkpoints_are_listed_shown_and_deleted(tenant: Tenant) -> None:
    with tenant.service() as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4).result(LIMIT_S)
        run = trainer.model_id
        path = trainer.save_state("kept").result(LIMIT_S).path
        listed = told(tenant, "run", "list")["runs"]
        assert run in {each["training_run_id"] for each in listed}
        assert told(tenant, "run", "info", run)["base_model"] == "tiny"
        assert path in json.dumps(told(tenant, "checkpoint", "list", "--run-id", run))
        assert path in json.dumps(told(tenant, "checkpoint", "list"))
        assert told(tenant, "checkpoint", "info", path)["tinker_path"] == path
        assert (
            tinker_command(tenant, "checkpoint", "set-ttl", path, "--ttl", "7200").returncode == 0
        )
        assert told(tenant, "checkpoint", "info", path)["expires_at"] is not None
        published = tinker_command(tenant, "checkpoint", "publish", path)
        assert published.returncode != 0
        assert "PlexRL has no" in published.stdout + published.stderr
        assert tinker_command(tenant, "checkpoint", "delete", "--yes", path).returncode == 0
        assert path not in json.dumps(told(tenant, "checkpoint", "list"))


def test_a_session_is_exported_as_a_trace_that_says_where_its_time_went(
    tenant: Tenant, tmp_path: Path
) -> None:
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    with tenant.service() as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4).result(LIMIT_S)
        for _ in range(4):
            trainer.forward_backward(supervised(), "cross_entropy").result(LIMIT_S)
            trainer.optim_step(types.AdamParams(learning_rate=0.01)).result(LIMIT_S)
        sampler = client.create_sampling_client(base_model="tiny").result()
        sampler.sample(prompt(ROWS[0]), 2, types.SamplingParams(max_tokens=8)).result(LIMIT_S)
        session = trainer.model_id.partition(":")[0]
        file = tmp_path / "session.pftrace"
        words = ("session", "export-trace", session, "--output", str(file))
        exported = tinker_command(tenant, *words)
        assert exported.returncode == 0, exported.stderr
    slices = slices_of(schema, schema.Trace.FromString(file.read_bytes()))
    whole = slices["time"]
    known = sum(end - start for start, end, name in whole if name != "unfinished")
    assert known >= 0.99 * (whole[-1][1] - whole[0][0])
    kinds = [name for *_, name in slices["train-0"]]
    assert (kinds.count("forward_backward"), kinds.count("optim_step")) == (4, 4)
    assert "generate" in {name for lane in slices.values() for *_, name in lane}


def test_a_trace_of_a_session_that_nobody_may_see_is_refused(tenant: Tenant) -> None:
    refused = tinker_command(tenant, "session", "export-trace", "tinker-other")
    assert refused.returncode != 0
    with tenant.http() as http:
        assert http.get("/traces/none.pftrace").status_code == 404
        assert http.get("/traces/..%2Ftinker.sqlite").status_code == 422
