"""A critic on a cluster: its values, checkpoints, and deployments that compute with its weights."""

from dataclasses import replace

import numpy as np
import pytest

import plexrl
from plexrl.errors import BatchShapeError, InvalidRequestError
from tests.cluster.tools import VOCABULARY

ROWS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
MASK = [[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0], [0.0, 1.0, 1.0]]
MODEL = plexrl.tiny_qwen2(VOCABULARY, hidden=32, layers=1)
CRITIC = replace(MODEL, head="value")


def values_of(critic: plexrl.TrainDeployment | plexrl.ReferenceDeployment) -> list[float]:
    found = critic.forward(plexrl.Batch(ROWS)).result(120)
    assert found.logprobs == []
    assert found.values is not None
    assert [len(row) for row in found.values] == [len(row) for row in ROWS]
    assert all(row[0] == 0 for row in found.values)
    return [float(value) for row in found.values for value in row]


def test_a_critic_learns_is_saved_and_is_opened_as_a_reward_model(job: plexrl.Job) -> None:
    critic = job.train_deployment("critic", CRITIC, workers=2)
    copy = job.reference_deployment("copy", CRITIC)
    before = values_of(critic)
    assert np.allclose(values_of(copy), before, atol=1e-5)
    returns = [[1.0] * len(row) for row in ROWS]
    batch = plexrl.Batch(ROWS, {"mask": MASK, "returns": returns})
    learned = []
    for step in range(10):
        trained = critic.forward_backward(batch, plexrl.losses.value(clip=None))
        if step == 5:
            critic.save_checkpoint("half")
        critic.optim_step(learning_rate=1e-2)
        learned.append(trained.result(120).metrics["squared_error"])
    assert learned[-1] < 0.1 * learned[0]
    after = values_of(critic)
    copy.sync_weights(critic).result(120)
    assert np.allclose(values_of(copy), after, atol=1e-5)
    # The score of a row is the value after its last token: that of a further token.
    path = critic.save_checkpoint("learned").result(120)["path"]
    reward = job.reward_deployment("reward", plexrl.ModelSpec(path=path))
    scores = reward.score(plexrl.Batch(ROWS)).result(120).scores
    longer = critic.forward(plexrl.Batch([[*row, 3] for row in ROWS])).result(120).values
    assert longer is not None
    assert np.allclose(scores, [row[-1] for row in longer], atol=1e-5)
    # A critic of a directory is the same one.
    again = job.train_deployment("again", plexrl.ModelSpec(path=path, head="value"))
    assert np.allclose(values_of(again), after, atol=1e-5)
    critic.load_checkpoint("half").result(120)
    assert not np.allclose(values_of(critic), after, atol=1e-3)


def test_what_a_critic_cannot_do_is_refused_by_name(job: plexrl.Job) -> None:
    with pytest.raises(InvalidRequestError, match="no rollout backend generates"):
        job.rollout_deployment("rollout", CRITIC)
    with pytest.raises(InvalidRequestError, match="only adapters are trained"):
        job.train_deployment("adapters", CRITIC, lora=plexrl.LoraSpec(rank=2))
    critic, actor = (
        job.train_deployment(name, model) for name, model in (("critic", CRITIC), ("actor", MODEL))
    )
    batch = plexrl.Batch(ROWS, {"mask": MASK})
    with pytest.raises(InvalidRequestError, match="cross_entropy needs logprobs"):
        critic.forward_backward(batch, plexrl.losses.cross_entropy())
    with pytest.raises(BatchShapeError, match="returns, values"):
        critic.forward_backward(batch, plexrl.losses.value())
    with pytest.raises(InvalidRequestError, match="needs values"):
        actor.forward_backward(batch.with_values("returns", MASK), plexrl.losses.value(clip=None))
    with pytest.raises(InvalidRequestError, match="create both with the same head"):
        job.reference_deployment("reference", MODEL).sync_weights(critic)
