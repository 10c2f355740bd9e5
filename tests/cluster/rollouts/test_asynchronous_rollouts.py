"""Asynchronous rollouts on a real cluster: the staleness bound, equality with synchronous training,
and what survives when processes are killed."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import plexrl
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import ConflictError, InvalidRequestError
from tests.cluster.tools import checkpoint_weights, kill_worker, process_of, wait_until

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MODEL = plexrl.tiny_qwen2(VOCABULARY, hidden=32, layers=1)
PROMPTS, SAMPLES = 4, 2
# A sample ends at each token with a probability of about 1/65, so lengths are skewed.
SAMPLING = plexrl.SamplingParams(max_tokens=160, seed=7)


def prompts() -> Iterator[list[int]]:
    """Prompts of 3 to 6 tokens, no two alike."""
    rng, number = np.random.default_rng(3), 0
    while True:
        body = rng.integers(3, 60, rng.integers(1, 5)).tolist()
        yield [3 + number // 60, 3 + number % 60, *body]
        number += 1


def number_of(prompt: list[int]) -> int:
    return (prompt[0] - 3) * 60 + prompt[1] - 3


def reward(prompt: list[int], sample: plexrl.Sample) -> float:
    del prompt
    return sum(token % 2 for token in sample.tokens) / len(sample.tokens)


def train(
    actor: plexrl.TrainDeployment,
    prompts: list[list[int]],
    samples: list[list[plexrl.Sample]],
    rewards: list[list[float]],
) -> None:
    """One step. The trainer's own logprobs replace the engine's, which vary in their last bits
    with what else the engine runs."""
    advantages = [[each - sum(group) / len(group) for each in group] for group in rewards]
    batch = plexrl.Batch.from_samples(prompts, samples, advantages)
    batch = batch.with_values("logprobs", actor.forward(batch).result().logprobs)
    actor.forward_backward(batch, plexrl.losses.importance_sampling())
    actor.optim_step(learning_rate=1e-2)


def asynchronous(
    job: plexrl.Job,
    actor: plexrl.TrainDeployment,
    staleness: int,
    sampling: plexrl.SamplingParams = SAMPLING,
) -> BoundedRollout:
    return job.asynchronous_rollout(
        "rollout",
        MODEL,
        actor,
        instances=3,
        staleness=staleness,
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=sampling,
    )


def run(
    job: plexrl.Job,
    staleness: int,
    steps: int,
    meanwhile: Callable[[int, BoundedRollout], None] = lambda _, __: None,
    sampling: plexrl.SamplingParams = SAMPLING,
) -> tuple[list[RolloutBatch], plexrl.TrainDeployment]:
    """Train `steps` steps; `meanwhile` is called before each one with the number of its batch."""
    actor = job.train_deployment("actor", MODEL)
    rollout = asynchronous(job, actor, staleness, sampling)
    found = []
    for batch in rollout.batches(prompts(), reward, steps=steps):
        meanwhile(batch.version, rollout)
        train(actor, batch.prompts, batch.samples, batch.rewards)
        found.append(batch)
    assert rollout.status()["dropped"] == 0
    return found, actor


def check(batches: list[RolloutBatch], staleness: int) -> None:
    """The recorded versions keep the bound; each prompt is trained once; rewards are those of the
    samples."""
    for batch in batches:
        assert len(batch.prompts) == PROMPTS
        for prompt, samples, versions, rewards in zip(
            batch.prompts, batch.samples, batch.sample_versions, batch.rewards, strict=True
        ):
            assert len(samples) == SAMPLES
            for sample, oldest, value in zip(samples, versions, rewards, strict=True):
                assert oldest >= batch.version - staleness
                assert all(span.version >= oldest for span in sample.weights)
                assert all(span.version <= batch.version for span in sample.weights)
                assert len(sample.tokens) == len(sample.logprobs) > 0
                assert sample.finish_reason in ("stop", "length")
                assert value == pytest.approx(reward(prompt, sample))
    trained = [number_of(prompt) for batch in batches for prompt in batch.prompts]
    assert len(set(trained)) == len(trained)


def test_without_staleness_it_is_synchronous_training_bit_for_bit(cluster: plexrl.Cluster) -> None:
    steps = 3
    with cluster.create_job("asynchronous") as job:
        batches, actor = run(job, 0, steps)
        weights = checkpoint_weights(actor)
    check(batches, 0)
    with cluster.create_job("synchronous") as job:
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout_deployment("rollout", MODEL)
        rows = prompts()
        for step in range(steps):
            rollout.sync_weights(actor)
            asked = [next(rows) for _ in range(PROMPTS)]
            sampling = replace(SAMPLING, first_sample=step * PROMPTS * SAMPLES)
            samples = rollout.generate(asked, n=SAMPLES, sampling=sampling).result().samples
            assert batches[step].prompts == asked
            for row, wanted in zip(batches[step].samples, samples, strict=True):
                assert [each.tokens for each in row] == [each.tokens for each in wanted]
            rewards = [[reward(p, s) for s in row] for p, row in zip(asked, samples, strict=True)]
            train(actor, asked, samples, rewards)
        assert checkpoint_weights(actor) == weights


@pytest.mark.parametrize(
    "staleness",
    [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
)
def test_no_trained_sample_is_older_than_the_bound(job: plexrl.Job, staleness: int) -> None:
    batches, _ = run(job, staleness, 6)
    check(batches, staleness)
    ages = {
        batch.version - oldest
        for batch in batches
        for row in batch.sample_versions
        for oldest in row
    }
    assert max(ages) > 0, "generation never ran ahead of training"


class Killer(threading.Thread):
    """Kills the rollout service and one instance in turns, each time while samples are drawn."""

    def __init__(self, embedded: EmbeddedCluster, job: plexrl.Job) -> None:
        super().__init__(daemon=True)
        self._embedded = embedded
        self._job = job
        self.rollout: BoundedRollout | None = None
        self.began = threading.Event()
        self.killed: list[str] = []

    def run(self) -> None:
        self.began.wait()
        for victim in ("service", "instance", "service", "instance"):
            wait_until(self._is_busy, "nothing is generated")
            if victim == "service":
                process_of(self._embedded, "plexrl.rollout").kill()
            else:
                kill_worker(self._job.rollout_deployment("rollout-1", MODEL), 0)
            self.killed.append(victim)

    def _is_busy(self) -> bool:
        assert self.rollout is not None
        return bool(self.rollout.status()["instances"]["rollout-1"]["trajectories"])

    def begin(self, version: int, rollout: BoundedRollout) -> None:
        self.rollout = rollout
        if version == 1:
            self.began.set()


@pytest.mark.slow
def test_killed_service_and_instances_lose_nothing(
    job: plexrl.Job, embedded: EmbeddedCluster
) -> None:
    killer = Killer(embedded, job)
    killer.start()
    long = replace(SAMPLING, max_tokens=300, ignore_eos=True)
    batches, _ = run(job, 1, 12, killer.begin, long)
    assert killer.killed == ["service", "instance"] * 2
    check(batches, 1)
    trained = {number_of(prompt) for batch in batches for prompt in batch.prompts}
    # What was given first is trained first, within the bound.
    assert trained >= set(range(2 * PROMPTS))
    assert all(len(s.tokens) == 300 for b in batches for row in b.samples for s in row)


def test_a_failed_reward_drops_its_prompt_and_is_no_reward_of_zero(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    rollout = asynchronous(job, actor, 1)

    def failing(prompt: list[int], sample: plexrl.Sample) -> float | None:
        return None if number_of(prompt) % 3 == 0 else reward(prompt, sample)

    trained = set[int]()
    for batch in rollout.batches(prompts(), failing, steps=3):
        assert len(batch.prompts) == PROMPTS
        trained |= {number_of(prompt) for prompt in batch.prompts}
        train(actor, batch.prompts, batch.samples, batch.rewards)
    assert not [each for each in trained if each % 3 == 0]
    assert rollout.status()["dropped"] >= 1
    assert "no reward" in rollout.status()["dropped_reason"]


def test_wrong_settings_are_refused(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)

    def make(staleness: int, sampling: plexrl.SamplingParams) -> plexrl.BoundedRollout:
        return job.asynchronous_rollout(
            *("rollout", MODEL, actor),
            instances=1,
            staleness=staleness,
            prompts=2,
            samples=2,
            sampling=sampling,
        )

    with pytest.raises(InvalidRequestError, match=r"sampling\.seed is missing"):
        make(0, plexrl.SamplingParams())
    made = make(0, SAMPLING)
    with pytest.raises(ConflictError, match="other settings"):
        make(1, SAMPLING)
    with pytest.raises(InvalidRequestError, match="give more prompts"):
        list(made.batches([next(prompts())], reward, steps=2))
