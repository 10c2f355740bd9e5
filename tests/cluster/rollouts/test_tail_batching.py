"""Tail batching on a real cluster: what is trained, what survives `kill -9`, dynamic sampling, and
the queue of long prompts after a change of the policy."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import ceil

import pytest

import plexrl
from plexrl import rewards
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    check,
    number_of,
    prompts,
    reward,
    train,
)
from tests.cluster.tools import DEADLINE_S, checkpoint_weights, kill_worker, process_of, wait_until

INSTANCES = 2


def tail_rollout(
    job: plexrl.Job,
    actor: plexrl.TrainDeployment,
    policy: plexrl.RolloutPolicy,
    *,
    sampling: plexrl.SamplingParams = SAMPLING,
    dynamic_sampling: bool = False,
) -> BoundedRollout:
    return job.rollout(
        "rollout",
        MODEL,
        actor,
        instances=INSTANCES,
        policy=policy,
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=sampling,
        dynamic_sampling=dynamic_sampling,
    )


class Killer(threading.Thread):
    """Kills the service and then an instance, while prompts are queued and samples are drawn."""

    def __init__(self, embedded: EmbeddedCluster, job: plexrl.Job, rollout: BoundedRollout) -> None:
        super().__init__(daemon=True)
        self._embedded = embedded
        self._job = job
        self._rollout = rollout
        self.queued: list[int] = []
        """Prompts in the queue at each kill."""

    def run(self) -> None:
        for victim in ("service", "instance"):
            wait_until(self._is_moment, "no prompt is queued while samples are drawn")
            if victim == "service":
                process_of(self._embedded, "plexrl.rollout").kill()
            else:
                kill_worker(self._job.rollout_deployment("rollout-1", MODEL), 0)

    def _is_moment(self) -> bool:
        found = self._rollout.status()
        is_busy = found["instances"]["rollout-1"]["trajectories"]
        if found["queued_prompts"] and is_busy:
            self.queued.append(found["queued_prompts"])
            return True
        return False


def test_every_prompt_is_trained_once_though_service_and_instance_are_killed(
    cluster: plexrl.Cluster, job: plexrl.Job, embedded: EmbeddedCluster
) -> None:
    steps, policy = 8, plexrl.TailBatching(over_launch=1.5, fixed_over_launch=True)
    actor = job.train_deployment("actor", MODEL)
    rollout = tail_rollout(job, actor, policy)
    killer = Killer(embedded, job, rollout)
    killer.start()
    batches = []
    for batch in rollout.batches(islice(prompts(), steps * PROMPTS), reward, steps=steps):
        train(actor, batch.prompts, batch.samples, batch.rewards)
        batches.append(batch)
    assert len(killer.queued) == 2, "it was over before both were killed"
    check(batches, 0)
    trained = [number for batch in batches for number in batch.prompt_numbers]
    assert sorted(trained) == list(range(steps * PROMPTS))
    status = rollout.status()
    assert status["queued_prompts"] == status["in_flight"] == status["dropped"] == 0
    assert status["totals"]["aborted_prompts"] > 0
    assert {each["round"] for each in status["batches"]} == {"short", "long"}
    assert trained_again(cluster, batches, policy) == checkpoint_weights(actor)


@pytest.mark.slow
def test_prompts_with_equal_rewards_are_dropped_and_others_are_trained_once(
    job: plexrl.Job,
) -> None:
    count, steps = 30, 6
    actor = job.train_deployment("actor", MODEL)
    rollout = tail_rollout(
        job,
        actor,
        plexrl.TailBatching(over_launch=1.5, fixed_over_launch=True),
        dynamic_sampling=True,
    )
    ticks = itertools.count()

    def graded(prompt: list[int], _: plexrl.Sample) -> float:
        # No two rewards of the other prompts are equal.
        return 1.0 if number_of(prompt) % 5 == 0 else next(ticks) / 100

    trained: list[int] = []
    for batch in rollout.batches(islice(prompts(), count), graded, steps=steps):
        assert len(batch.prompts) == PROMPTS
        assert all(len(set(row)) == SAMPLES for row in batch.rewards)
        trained += batch.prompt_numbers
        train(actor, batch.prompts, batch.samples, batch.rewards)
    assert sorted(trained) == [number for number in range(count) if number % 5]
    status = rollout.status()
    # The last ones may not be graded yet.
    assert 0 < status["dropped"] <= count - len(trained)
    assert status["dropped_reason"] == "equal rewards"
    assert status["totals"]["aborted_prompts"] > 0


# `tests/rollout/batching/test_tail_batching.py` and the random histories change policies.
@pytest.mark.slow
def test_another_policy_takes_over_the_queue(job: plexrl.Job) -> None:
    """From tail batching to generation ahead of training, and back: every prompt is trained once,
    and what was queued does not wait behind new prompts."""
    steps = 12
    actor = job.train_deployment("actor", MODEL)
    began = set[int]()

    def graded(prompt: list[int], sample: plexrl.Sample) -> float:
        began.add(number_of(prompt))
        return reward(prompt, sample)

    def run(
        policy: plexrl.RolloutPolicy, is_over: Callable[[list[RolloutBatch]], bool]
    ) -> list[RolloutBatch]:
        found: list[RolloutBatch] = []
        rollout = tail_rollout(job, actor, policy)
        for batch in rollout.batches(islice(prompts(), steps * PROMPTS), graded, steps=steps):
            train(actor, batch.prompts, batch.samples, batch.rewards)
            found.append(batch)
            if is_over(found):
                break
        return found

    def waiting(found: list[RolloutBatch]) -> set[int]:
        """Prompts that were aborted: they have samples, and were not trained."""
        return began - {number for batch in found for number in batch.prompt_numbers}

    first = run(
        plexrl.TailBatching(over_launch=1.5, fixed_over_launch=True),
        lambda found: bool(waiting(found)),
    )
    queued = waiting(first)
    assert queued
    assert len(first) < steps - 4
    ahead = run(plexrl.BoundedStaleness(1), lambda found: len(found) == 3)
    check(ahead, 1)
    numbers = [number for batch in ahead[:2] for number in batch.prompt_numbers]
    assert queued <= set(numbers), "later than the bound allows"
    last = run(plexrl.TailBatching(over_launch=1.5, fixed_over_launch=True), lambda _: False)
    check(first, 0)
    check([*first, *ahead, *last], 1)
    trained = [n for batch in [*first, *ahead, *last] for n in batch.prompt_numbers]
    assert sorted(trained) == list(range(steps * PROMPTS))


class LateRewards:
    """Grades the samples of prompt 0 wrongly, and only when the prompt was aborted and generated
    anew: before the new samples are graded. The other prompts wait for its first samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: list[threading.Thread] = []
        self._have_begun, self._may_end = threading.Event(), threading.Event()
        self.graded_again = 0

    def __call__(self, prompt: list[int], sample: plexrl.Sample) -> float:
        if number_of(prompt):
            assert self._have_begun.wait(DEADLINE_S)
            return reward(prompt, sample)
        with self._lock:
            is_late = len(self._late) < SAMPLES
            if is_late:
                self._late.append(threading.current_thread())
            self.graded_again += not is_late
        if is_late:
            if len(self._late) == SAMPLES:
                self._have_begun.set()
            assert self._may_end.wait(DEADLINE_S)
            return 999.0
        self._may_end.set()
        for each in self._late:
            each.join()
        return reward(prompt, sample)


def test_late_rewards_of_aborted_samples_do_not_count_for_the_new_ones(job: plexrl.Job) -> None:
    steps = 4
    actor = job.train_deployment("actor", MODEL)
    rollout = tail_rollout(job, actor, plexrl.TailBatching(over_launch=1.5, fixed_over_launch=True))
    late = LateRewards()
    graded = rewards.Graded(late, on_failure="raise", at_once=steps * PROMPTS * SAMPLES * 2)
    batches = []
    for batch in rollout.batches(islice(prompts(), steps * PROMPTS), graded, steps=steps):
        train(actor, batch.prompts, batch.samples, batch.rewards)
        batches.append(batch)
    assert late.graded_again == SAMPLES
    check(batches, 0)
    assert 0 not in batches[0].prompt_numbers
    assert 0 in {number for batch in batches for number in batch.prompt_numbers}


def trained_again(
    cluster: plexrl.Cluster, batches: list[RolloutBatch], policy: plexrl.TailBatching
) -> bytes:
    """The weights after the same steps of a plain loop, which draws each prompt again with the
    weights of its step."""
    factor = (
        policy.over_launch if policy.over_launch_responses is None else policy.over_launch_responses
    )
    drawn = ceil(factor * SAMPLES)
    with cluster.create_job("again") as job:
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout_deployment("rollout", MODEL)
        for batch in batches:
            rollout.sync_weights(actor)
            futures = [
                rollout.generate(
                    [prompt], n=drawn, sampling=replace(SAMPLING, first_sample=number * drawn)
                )
                for number, prompt in zip(batch.prompt_numbers, batch.prompts, strict=True)
            ]
            samples = []
            for future, trained in zip(futures, batch.samples, strict=True):
                [found] = future.result().samples
                tokens = [each.tokens for each in trained]
                samples.append([each for each in found if each.tokens in tokens])
                assert [each.tokens for each in samples[-1]] == tokens
            values = [
                [reward(prompt, each) for each in row]
                for prompt, row in zip(batch.prompts, samples, strict=True)
            ]
            train(actor, batch.prompts, samples, values)
        return checkpoint_weights(actor)
