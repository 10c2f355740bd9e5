"""The options of `sync_weights` and the weights that result."""

import numpy as np
import pytest

import plexrl
from plexrl.errors import InvalidRequestError, UnsupportedDtypeError
from plexrl.model.spec import parameter_count
from tests.cluster.tools import VOCABULARY, some_batch


def step(actor: plexrl.TrainDeployment, seed: int, learning_rate: float = 1e-4) -> None:
    actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
    actor.optim_step(learning_rate=learning_rate)


def test_delta_and_full_syncs_yield_the_same_bits(job: plexrl.Job) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    parameters = parameter_count(model)
    actor = job.train_deployment("actor", model, workers=2)
    by_delta, plain = [
        job.rollout_deployment(name, model, dtype="bfloat16") for name in ("delta", "plain")
    ]
    wide = job.rollout_deployment("wide", model)
    for number in range(3):
        step(actor, number)
        found = by_delta.sync_weights(actor, delta=True, digest=True).result(120)
        every = plain.sync_weights(actor, delta=False, digest=True).result(120)
        assert found["digest"] == every["digest"]
        assert found["bytes_wanted"] == every["bytes_moved"] == 2 * parameters
        assert found["way"] == ("full" if number == 0 else "delta")
        assert (every["way"], every["fraction"]) == ("full", 1.0)
        assert found["fraction"] == found["bytes_moved"] / found["bytes_wanted"]
        assert found["sources"] == {"shared_memory": found["bytes_moved"]}
    # Within a machine blocks are compared only on request.
    for _ in range(2):
        step(actor, 7)
        assert wide.sync_weights(actor).result(120)["way"] == "full"


@pytest.mark.slow
def test_a_published_version_does_not_contain_what_the_trainer_does_next(job: plexrl.Job) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=6)
    actor = job.train_deployment("actor", model, workers=1)
    rollouts = [job.rollout_deployment(f"rollout-{number}", model) for number in range(2)]
    # Nothing is published yet, so the trainer publishes for this sync.
    initial = rollouts[0].sync_weights(actor, published=True, digest=True).result(120)
    step(actor, 1, learning_rate=1e-2)
    publish = actor.publish()
    step(actor, 2, learning_rate=1e-2)
    assert publish.result(120)["trainer_step"] == 1
    found = [
        rollout.sync_weights(actor, published=True, digest=True).result(120) for rollout in rollouts
    ]
    present = rollouts[0].sync_weights(actor, digest=True).result(120)
    assert [initial["trainer_step"], present["trainer_step"]] == [0, 2]
    assert [each["trainer_step"] for each in found] == [1, 1]
    assert len({each["digest"] for each in found}) == 1
    assert len({initial["digest"], found[0]["digest"], present["digest"]}) == 3


def test_loaded_weights_are_not_the_base_of_a_delta(job: plexrl.Job) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=6)
    actor = job.train_deployment("actor", model, workers=1)
    rollout = job.rollout_deployment("rollout", model)
    first = rollout.sync_weights(actor, digest=True).result(120)
    actor.save_checkpoint("other").result(120)
    step(actor, 1, learning_rate=1e-2)
    second = rollout.sync_weights(actor, delta=True, digest=True).result(120)
    rollout.load_checkpoint("other").result(120)
    third = rollout.sync_weights(actor, delta=True, digest=True).result(120)
    assert second["digest"] == third["digest"] != first["digest"]
    assert third["way"] == "full"


def test_a_bfloat16_rollout_is_close_to_its_trainer(job: plexrl.Job) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=5)
    actor = job.train_deployment("actor", model, workers=1)
    rollout = job.rollout_deployment("rollout", model, dtype="bfloat16")
    step(actor, 3, learning_rate=1e-2)
    rollout.sync_weights(actor)
    sampling = plexrl.SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    [samples] = rollout.generate([[3, 4, 5]], n=2, sampling=sampling).result(120).samples
    batch = plexrl.Batch([[3, 4, 5, *sample.tokens] for sample in samples])
    for sample, trained in zip(samples, actor.forward(batch).result(120).logprobs, strict=True):
        differences = np.abs(trained[3:] - sample.logprobs)
        assert 0 < differences.max() < 0.1


def test_an_unsupported_rollout_dtype_is_refused(job: plexrl.Job) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY)
    with pytest.raises(UnsupportedDtypeError, match="float32 or bfloat16, not float8_e4m3fn"):
        job.rollout_deployment("rollout", model, dtype="float8_e4m3fn")  # type: ignore[arg-type]
    actor = job.train_deployment("actor", model)
    rollout = job.rollout_deployment("rollout", model)
    with pytest.raises(InvalidRequestError, match="sync_weights"):
        rollout.sync_weights(actor, delta="sometimes")  # type: ignore[arg-type]
