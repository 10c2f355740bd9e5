"""From a live rollout to the mode that would pay: its profile, and `plexrl plan-rollout`."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.client.data.rollout_profile import rollout_profile_from_json
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import ConflictError
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    prompts,
    reward,
    train,
)

STEPS = 3


def command(embedded: EmbeddedCluster, *words: str | Path) -> str:
    env = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key, "COLUMNS": "80"}
    found = CliRunner().invoke(app, [str(each) for each in words], env={**env, "TERM": "dumb"})
    assert found.exit_code == 0, found.output
    return found.stdout


def test_a_live_rollout_is_planned_from_its_profile(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    with cluster.create_job("profiled") as job:
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout(
            "rollout",
            MODEL,
            actor,
            instances=2,
            policy=plexrl.BoundedStaleness(1),
            prompts=PROMPTS,
            samples=SAMPLES,
            sampling=SAMPLING,
        )
        with pytest.raises(ConflictError, match="two training steps"):
            job.rollout_profile("rollout")
        lengths = []
        for batch in rollout.batches(islice(prompts(), 40), reward, steps=STEPS):
            lengths += [sorted(len(each.tokens) for each in group) for group in batch.samples]
            train(actor, batch.prompts, batch.samples, batch.rewards)
        actor.barrier().result()
        text = command(embedded, "rollouts", job.job, "--profile", "rollout")
    profile = rollout_profile_from_json(text)
    assert sorted(sorted(each.response_tokens) for each in profile.lengths) == sorted(lengths)
    assert (profile.prompts, profile.samples, profile.max_tokens) == (
        PROMPTS,
        SAMPLES,
        SAMPLING.max_tokens,
    )
    assert (profile.instances, profile.instance_gpus, profile.trainer_gpus) == (2, 1, 1)
    assert profile.measured_steps
    assert profile.train_s > 0
    path = tmp_path / "profile.json"
    path.write_text(text)
    plan: dict[str, Any] = json.loads(
        command(
            embedded,
            *("plan-rollout", path, "--json", "--workers", "1", "--seeds", "1", "--staleness", "1"),
        )
    )
    assert plan["modes"][0]["mode"]["name"] == "sync"
    assert plan["modes"][0]["gain"] == 1.0
