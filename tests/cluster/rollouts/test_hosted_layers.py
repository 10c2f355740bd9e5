"""Reference and reward models with their layers in host memory, on a real cluster."""

import json
from dataclasses import replace

import numpy as np
import pytest

import plexrl
from plexrl.client.blocking.job import Dtype
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import InvalidRequestError
from tests.cluster.tools import VOCABULARY, kill_worker, process_of, some_batch

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=7, hidden=64, layers=5)
BATCH = some_batch(3, rows=9)
# More layers than slots, and slots for all of them. `LayerStream` has a test of any number.
USUAL = ((2, "float32"), (9, "bfloat16"))


def logprobs(model: plexrl.TrainDeployment | plexrl.ReferenceDeployment) -> np.ndarray:
    return np.concatenate(model.forward(BATCH, micro_batch_tokens=40).result(120).logprobs)


def moved(job: plexrl.Job, kind: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in job.operations():
        if row["kind"] == kind and row["state"] == "finished":
            name = row["deployment"].rpartition("/")[2]
            found.setdefault(name, []).append(json.loads(row["result_json"]).get("bytes_moved", 0))
    return found


@pytest.mark.parametrize(
    ("layers", "dtype"),
    [
        pytest.param(layers, dtype, marks=[] if (layers, dtype) in USUAL else pytest.mark.slow)
        for dtype in ("float32", "bfloat16")
        for layers in (1, 2, 3, 4, 5, 9)
    ],
)
def test_results_are_those_of_layers_on_the_device(
    job: plexrl.Job, layers: int, dtype: Dtype
) -> None:
    whole = job.reference_deployment("whole", MODEL, dtype=dtype)
    hosted = job.reference_deployment(
        "hosted", MODEL, dtype=dtype, layers_on_device=layers, workers=2
    )
    wanted = logprobs(job.reference_deployment("both", MODEL, dtype=dtype, workers=2))
    for _ in range(2):
        assert np.array_equal(logprobs(hosted), wanted)
    assert np.allclose(logprobs(whole), wanted, atol=1e-2 if dtype == "bfloat16" else 1e-5)


def test_a_switch_moves_only_what_is_on_the_device(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    whole = job.reference_deployment("whole", MODEL)
    hosted = job.reference_deployment("hosted", MODEL, layers_on_device=2)
    reward = job.reward_deployment("reward", MODEL, layers_on_device=2)
    wanted = logprobs(actor)
    scores = reward.score(BATCH).result(120).scores
    for _ in range(3):
        assert np.allclose(logprobs(whole), wanted, atol=1e-5)
        assert np.allclose(logprobs(hosted), wanted, atol=1e-5)
        assert np.array_equal(reward.score(BATCH).result(120).scores, scores)
        assert np.array_equal(logprobs(actor), wanted)
    groups = {each.status()["group"] for each in (actor, whole, hosted, reward)}
    assert len(groups) == 1, "all of them were to share a group"
    loads, offloads = moved(job, "load"), moved(job, "offload")
    embeddings = (len(VOCABULARY) + 3) * 64 * 4
    assert max(loads["whole"]) > 10 * embeddings
    assert len([each for each in loads["hosted"] if each]) >= 2
    assert max(loads["hosted"]) < 3 * embeddings
    assert set(offloads["hosted"][1:]) == {0}


def test_killed_worker_and_statemanager_lose_nothing(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    actor = job.train_deployment("actor", MODEL)
    hosted = job.reference_deployment("hosted", MODEL, layers_on_device=2, workers=1)
    wanted = logprobs(hosted)
    actor.barrier().result(120)
    logprobs(actor)
    assert np.array_equal(logprobs(hosted), wanted)
    kill_worker(hosted, 0)
    assert np.array_equal(logprobs(hosted), wanted)
    process_of(embedded, "plexrl.statemanager").kill()
    for _ in range(2):
        logprobs(actor)
        assert np.array_equal(logprobs(hosted), wanted)


def test_a_loaded_checkpoint_replaces_the_layers_in_host_memory(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", replace(MODEL, seed=9))
    hosted = job.reference_deployment("hosted", MODEL, layers_on_device=2)
    before = logprobs(hosted)
    actor.save_checkpoint("other").result(120)
    wanted = logprobs(actor)
    assert not np.allclose(before, wanted, atol=1e-3)
    for _ in range(2):
        hosted.load_checkpoint("other").result(120)
        assert np.allclose(logprobs(hosted), wanted, atol=1e-5)
        logprobs(actor)
        assert np.allclose(logprobs(hosted), wanted, atol=1e-5)
    kill_worker(hosted, 0)
    assert np.allclose(logprobs(hosted), wanted, atol=1e-5)


def test_what_hosted_layers_cannot_do_is_refused(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    hosted = job.reference_deployment("hosted", MODEL, layers_on_device=2)
    with pytest.raises(InvalidRequestError, match="where no sync writes"):
        hosted.sync_weights(actor).result(120)
    with pytest.raises(InvalidRequestError, match="layers_on_device"):
        job.reference_deployment("none", MODEL, layers_on_device=0)
