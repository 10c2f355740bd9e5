"""Asynchronous rollouts on a real cluster: the staleness bound, equality with synchronous training,
and what survives when processes are killed."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat

import numpy as np
import pytest

import plexrl
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import ConflictError, InvalidRequestError, RolloutFailedError
from tests.cluster.tools import checkpoint_weights, kill_worker, process_of, wait_until

VOCABULARY = "0123456789abcdefghijklmnopqrst"
MODEL = plexrl.tiny_qwen2(VOCABULARY, hidden=32, layers=1)
PROMPTS, SAMPLES = 4, 2
BASE = len(VOCABULARY)
# A sample ends at each token with a probability of about 1/33, so lengths are skewed.
SAMPLING = plexrl.SamplingParams(max_tokens=80, seed=7)


def prompts() -> Iterator[list[int]]:
    """Prompts of 3 to 6 tokens, no two alike."""
    rng, number = np.random.default_rng(3), 0
    while True:
        body = rng.integers(3, BASE, rng.integers(1, 5)).tolist()
        yield [3 + number // BASE, 3 + number % BASE, *body]
        number += 1


def number_of(prompt: list[int]) -> int:
    return (prompt[0] - 3) * BASE + prompt[1] - 3


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
    *,
    failed_prompts_max: int = 0,
    first_batch: int = 0,
) -> BoundedRollout:
    return job.rollout(
        "rollout",
        MODEL,
        actor,
        instances=3,
        policy=plexrl.BoundedStaleness(staleness),
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=sampling,
        failed_prompts_max=failed_prompts_max,
        first_batch=first_batch,
    )


def run(
    job: plexrl.Job,
    staleness: int,
    steps: int,
    meanwhile: Callable[[int, BoundedRollout], None] = lambda _, __: None,
    sampling: plexrl.SamplingParams = SAMPLING,
    reward: Callable[[list[int], plexrl.Sample], float] = reward,
) -> tuple[list[RolloutBatch], plexrl.TrainDeployment]:
    """Train `steps` steps with as many prompts as they need; `meanwhile` is called before each one
    with the number of its batch. Everything that was generated is trained in the end."""
    actor = job.train_deployment("actor", MODEL)
    rollout = asynchronous(job, actor, staleness, sampling)
    rows = islice(prompts(), steps * PROMPTS)
    found = []
    for batch in rollout.batches(rows, reward, steps=steps):
        meanwhile(batch.version, rollout)
        train(actor, batch.prompts, batch.samples, batch.rewards)
        found.append(batch)
    status = rollout.status()
    assert status["dropped"] == status["waiting"] == status["in_flight"] == 0
    tokens = [len(each.tokens) for batch in found for row in batch.samples for each in row]
    trained = {"samples": len(tokens), "tokens": sum(tokens)}
    assert status["totals"]["generated"] == status["totals"]["trained"] == trained
    assert sum(status["staleness_seen"].values()) == len(tokens)
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
    generated: list[int] = []

    def recorded(prompt: list[int], sample: plexrl.Sample) -> float:
        generated.append(len(sample.tokens))
        return reward(prompt, sample)

    batches, _ = run(job, staleness, 6, reward=recorded)
    check(batches, staleness)
    # Long samples are not left out.
    trained = [len(each.tokens) for b in batches for row in b.samples for each in row]
    assert sorted(trained) == sorted(generated)
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


@pytest.mark.slow
def test_a_rollout_whose_generations_all_fail_ends_with_the_cause(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    # They do not fit into the 512 tokens of the model.
    too_long = repeat([5] * 600, 3 * PROMPTS)
    rows = list(chain(too_long, islice(prompts(), 3 * PROMPTS)))
    failures = []
    batches: list[RolloutBatch] = []
    while not batches:
        rollout = asynchronous(job, actor, 1, failed_prompts_max=PROMPTS)
        try:
            for batch in rollout.batches(rows, reward, steps=2):
                train(actor, batch.prompts, batch.samples, batch.rewards)
                batches.append(batch)
        except RolloutFailedError as error:
            failures.append(error)
            status = rollout.status()
            assert status["state"] == "failed"
            assert status["failure"] is not None
            assert status["failure"]["code"] == "rollout_failed"
        assert len(failures) <= 3
    # Asked again, it has gone on behind the prompts that were dropped.
    assert failures
    assert "600" in failures[0].message
    assert "their generations failed" in failures[0].message
    assert [batch.version for batch in batches] == [0, 1]
    assert rollout.status()["totals"]["failed_generations"] >= 3 * 3 * PROMPTS
    check(batches, 1)


@pytest.mark.slow
def test_a_model_from_a_checkpoint_goes_on_with_the_batches_after_it(
    cluster: plexrl.Cluster,
) -> None:
    with cluster.create_job("first") as job:
        _, actor = run(job, 1, 2)
        actor.save_checkpoint("two").result(120)
        earlier = job.job
    with cluster.create_job("second") as job:
        actor = job.train_deployment("actor", MODEL)
        actor.load_checkpoint("two", job=earlier).result(120)
        rollout = asynchronous(job, actor, 1, first_batch=2)
        batches = []
        for batch in rollout.batches(prompts(), reward, steps=4):
            train(actor, batch.prompts, batch.samples, batch.rewards)
            batches.append(batch)
        actor.barrier().result()
        assert actor.status()["trainer_step"] == 4
    assert [batch.version for batch in batches] == [2, 3]
    check(batches, 1)
    spans = [span for b in batches for row in b.samples for each in row for span in each.weights]
    assert {span.version for span in spans} <= {2, 3}
    # Each batch is one step of the trainer.
    assert all(span.trainer_step == span.version for span in spans)


CONTROLLER = """
import json, sys, plexrl
from tests.cluster.rollouts.test_asynchronous_rollouts import *

url, key, job_id = sys.argv[1:]
with plexrl.connect(url, key) as cluster:
    job = cluster.attach_job(job_id)
    actor = job.train_deployment("actor", MODEL)
    for batch in asynchronous(job, actor, 1).batches(prompts(), reward, steps=6):
        print(json.dumps(["has", batch.version, batch.prompt_numbers]), flush=True)
        train(actor, batch.prompts, batch.samples, batch.rewards)
        actor.barrier().result()
        print(json.dumps(["trained", batch.version, batch.prompt_numbers]), flush=True)
"""


@pytest.mark.slow
def test_a_killed_controller_goes_on_with_the_batch_that_it_had(
    cluster: plexrl.Cluster, embedded: EmbeddedCluster
) -> None:
    job = cluster.create_job("killed")
    trained: dict[int, list[int]] = {}
    had: dict[int, list[int]] = {}
    for kill_at in (["has", 1], ["trained", 3], None):
        command = [sys.executable, "-c", CONTROLLER, embedded.url, embedded.api_key, job.job]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
            assert controller.stdout is not None
            for line in controller.stdout:
                what, version, numbers = json.loads(line)
                if what == "has":
                    # After a kill, a batch comes again as it was.
                    assert had.setdefault(version, numbers) == numbers
                else:
                    assert version not in trained
                    trained[version] = numbers
                if [what, version] == kill_at:
                    controller.kill()
                    break
        assert controller.returncode == (0 if kill_at is None else -9)
    job = cluster.attach_job(job.job)
    assert job.train_deployment("actor", MODEL).status()["trainer_step"] == 6
    job.finish()
    # Batch 1 was trained once: the controller that had it first ended before its step.
    assert sorted(trained) == list(range(6))
    numbers = [each for row in trained.values() for each in row]
    assert len(set(numbers)) == 6 * PROMPTS


def test_wrong_settings_are_refused(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)

    def make(
        staleness: int, sampling: plexrl.SamplingParams, samples: int = 2
    ) -> plexrl.BoundedRollout:
        return job.rollout(
            *("rollout", MODEL, actor),
            instances=1,
            policy=plexrl.BoundedStaleness(staleness),
            prompts=2,
            samples=samples,
            sampling=sampling,
        )

    with pytest.raises(InvalidRequestError, match=r"sampling\.seed is missing"):
        make(0, plexrl.SamplingParams())
    made = make(0, SAMPLING)
    with pytest.raises(ConflictError, match=r"other settings: samples \(2, not 3\)"):
        make(0, SAMPLING, samples=3)
    with pytest.raises(InvalidRequestError, match="give more prompts"):
        list(made.batches([next(prompts())], reward, steps=2))
