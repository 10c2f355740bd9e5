"""Each sample has the trainer step of the weights that drew it."""

from typing import Any

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import VOCABULARY, kill_worker, process_of, some_batch, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


def step(actor: plexrl.TrainDeployment, times: int = 1) -> int:
    """Make steps; return the trainer step of the last."""
    for seed in range(times):
        actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
        done = actor.optim_step(learning_rate=1e-3)
    return done.result(120).trainer_step


def drawn_by(rollout: plexrl.RolloutDeployment) -> int:
    """The trainer step of the weights that draw now."""
    sampling = plexrl.SamplingParams(max_tokens=3, seed=1)
    found = rollout.generate([[3, 4]], n=2, sampling=sampling).result(120)
    steps = {sample.trainer_step for sample in found.samples[0]}
    assert steps == {found.trainer_step}
    assert found.samples[0][0].weights == ((0, found.weights_seq, found.trainer_step),)
    return found.trainer_step


def test_samples_have_the_trainer_step_of_their_weights(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2)
    rollout = job.rollout_deployment("rollout", MODEL)
    assert drawn_by(rollout) == 0, "the model as it was given"
    assert step(actor, 2) == 2
    assert drawn_by(rollout) == 0, "nothing was synced"
    assert rollout.sync_weights(actor).result(120)["trainer_step"] == 2
    assert step(actor) == 3
    actor.save_checkpoint("three").result(120)
    assert drawn_by(rollout) == 2
    assert step(actor) == 4
    rollout.sync_weights(actor, delta=True)
    assert drawn_by(rollout) == 4
    assert rollout.status()["trainer_step"] == actor.status()["trainer_step"] == 4

    kill_worker(rollout, 0)
    assert drawn_by(rollout) == 4, "after a recovery as before it"
    kill_worker(actor, 1)
    assert step(actor) == 5
    former = process_of(embedded, "plexrl.scheduler")
    former.kill()
    wait_until(lambda: process_of(embedded, "plexrl.scheduler") != former, "it did not come back")
    assert drawn_by(rollout) == 4
    rollout.sync_weights(actor)
    assert drawn_by(rollout) == 5

    loaded = rollout.load_checkpoint("three").result(120)
    assert (loaded["trainer_step"], drawn_by(rollout)) == (3, 3)
    kill_worker(rollout, 0)
    assert drawn_by(rollout) == 3
    assert actor.load_checkpoint("three").result(120)["trainer_step"] == 3
    assert step(actor) == 4
    rollout.sync_weights(actor)
    assert drawn_by(rollout) == 4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"lora": plexrl.LoraSpec(rank=4)}, id="adapters"),
        pytest.param({"optimizer": "host"}, id="host optimizer"),
    ],
)
def test_steps_count_wherever_the_optimizer_is(job: plexrl.Job, options: dict[str, Any]) -> None:
    actor = job.train_deployment("actor", MODEL, **options)
    rollout = job.rollout_deployment("rollout", MODEL, lora=options.get("lora"))
    assert step(actor, 2) == 2
    actor.save_checkpoint("two").result(120)
    rollout.sync_weights(actor)
    assert drawn_by(rollout) == 2
    kill_worker(actor, 0)
    assert step(actor) == 3
    rollout.sync_weights(actor)
    assert drawn_by(rollout) == 3
    assert actor.load_checkpoint("two").result(120)["trainer_step"] == 2
    rollout.load_checkpoint("two")
    assert drawn_by(rollout) == 2


def test_loading_without_the_optimizer_restarts_the_step_count(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    step(actor, 2)
    actor.save_checkpoint("weights", format="hf").result(120)
    assert actor.load_checkpoint("weights", optimizer=False).result(120)["trainer_step"] == 0
    assert step(actor) == 1
    reference = job.reference_deployment("reference", MODEL)
    assert reference.sync_weights(actor).result(120)["trainer_step"] == 1
    assert reference.load_checkpoint("weights").result(120)["trainer_step"] == 2
