"""What a controller can ask of a rollout's engine while it runs."""

import json
from typing import Any

from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.embedded import EmbeddedCluster
from tests.cluster.tools import VOCABULARY

BLOCK_BYTES = 16 * 512
"""Of a cache of `tiny_qwen2`, in float32."""


def test_a_cache_within_its_budget_draws_the_same_and_says_what_it_cost(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    options: Any = {"max_sequence_tokens": 64, "max_concurrent_samples": 8}
    plenty = job.rollout_deployment("plenty", model, **options)
    short = job.rollout_deployment("short", model, kv_cache_bytes=6 * BLOCK_BYTES, **options)
    assert short.status()["engines"] == [], "before its first operation it has no weights"
    sampling = plexrl.SamplingParams(max_tokens=44, seed=3, ignore_eos=True)
    prompts = [[3, 4, 5, 6], [7, 8], [9]]
    wanted = plenty.generate(prompts, n=2, sampling=sampling).result(60)
    found = short.generate(prompts, n=2, sampling=sampling).result(60)
    tokens = [[sample.tokens for sample in samples] for samples in found.samples]
    assert tokens == [[sample.tokens for sample in samples] for samples in wanted.samples]
    assert found.samples[0][0].weights == ((0, found.weights_seq),)
    assert wanted.metrics["preemptions"] == 0
    assert found.metrics["preemptions"] > 0
    assert found.metrics["kv_cache_bytes"] == 6 * BLOCK_BYTES
    assert found.metrics["kv_cache_bytes_used_max"] == 6 * BLOCK_BYTES
    [engine] = short.status()["engines"]
    assert engine["preemptions"] == found.metrics["preemptions"]
    assert (engine["running"], engine["blocks"], engine["blocks_held"]) == (0, 6, 0)
    arguments = ["jobs", job.job, "--url", embedded.url, "--api-key", embedded.api_key]
    shown = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    engines = {each["deployment"]: each["engines"] for each in shown["deployments"]}
    assert engines[short.deployment] == [engine]
    assert "preemptions" in CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout
