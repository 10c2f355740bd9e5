"""Faults of generations, tools and graders on a real cluster: nothing partial is trained, no reward
is made up, and the model is the one that a run without faults trains.

The faults are real ones: prompts that no engine can take, operations that somebody cancels, a tool
whose process crashes or hangs, and a grader that raises. Their places follow from the prompts.
"""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from urllib.parse import quote

import httpx
import pytest

import plexrl
from plexrl import rewards
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    PROMPTS,
    check,
    number_of,
    prompts,
    train,
)
from tests.cluster.rollouts.test_tail_batching import tail_rollout, trained_again
from tests.cluster.tools import checkpoint_weights

STEPS = 5
RUNS_MAX = 10
EVERY = 20
"""One in so many prompts meets each kind of fault: 5 %."""
TOOL = """
import os, signal, sys, time
fault, tokens = sys.argv[1], [int(each) for each in sys.stdin.read().split()]
if fault == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "hang":
    time.sleep(60)
print(sum(each % 2 for each in tokens) / len(tokens))
"""


def is_faulty(number: int, kind: int) -> bool:
    """Whether the prompt meets the faults of a kind."""
    return number % EVERY == (3, 6, 9, 12)[kind]


class Grading:
    """A reward that asks a tool in a process of its own. The first `failures_max` calls for each
    sample of a faulty prompt fail."""

    def __init__(self, failures_max: int) -> None:
        self._failures_max = failures_max
        self._lock = threading.Lock()
        self._failures = Counter[tuple[int, ...]]()
        self.failed: set[int] = set()

    def __call__(self, prompt: list[int], sample: plexrl.Sample) -> float:
        number = number_of(prompt)
        fault = self._fault(number, tuple(sample.tokens))
        if fault == "raise":
            raise ValueError(f"prompt {number} has no answer key")
        words = " ".join(map(str, sample.tokens))
        command = [sys.executable, "-SEI", "-c", TOOL, fault]
        timeout_s = 0.3 if fault == "hang" else 60.0
        done = subprocess.run(
            command, input=words, capture_output=True, text=True, check=True, timeout=timeout_s
        )
        return float(done.stdout)

    def _fault(self, number: int, sample: tuple[int, ...]) -> str:
        kinds = ("crash", "hang", "raise")
        found = next((name for kind, name in enumerate(kinds) if is_faulty(number, kind)), "")
        with self._lock:
            if not found or self._failures[number, *sample] >= self._failures_max:
                return ""
            self._failures[number, *sample] += 1
            self.failed.add(number)
        return found


class Canceller(threading.Thread):
    """Cancels generations that run, as an operator may, until it meets one that has not ended: no
    sample fails as often as its prompt is dropped for."""

    def __init__(self, embedded: EmbeddedCluster, job: plexrl.Job, rollout: BoundedRollout) -> None:
        super().__init__(daemon=True)
        self._embedded = embedded
        self._job = job
        self._rollout = rollout
        self.is_over = threading.Event()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {self._embedded.api_key}"}
        while not self.is_over.wait(0.01) and not failed_generations(self._rollout):
            for each in self._job.explain()["operations"]:
                if each["kind"] == "generate":
                    url = f"{self._embedded.url}/v1/operations/{quote(each['operation'], safe='')}"
                    httpx.delete(url, headers=headers).raise_for_status()
                    break


def failed_generations(rollout: BoundedRollout) -> int:
    return int(rollout.status()["totals"]["failed_generations"])


def trained(
    rollout: BoundedRollout,
    actor: plexrl.TrainDeployment,
    rows: Iterator[list[int]],
    graded: rewards.Graded[plexrl.Sample],
) -> list[RolloutBatch]:
    found = []
    for batch in rollout.batches(rows, graded, steps=STEPS):
        train(actor, batch.prompts, batch.samples, batch.rewards)
        found.append(batch)
    return found


@pytest.mark.slow
def test_faults_that_are_mended_by_another_try_change_nothing(
    cluster: plexrl.Cluster, embedded: EmbeddedCluster
) -> None:
    def run(*, has_faults: bool) -> tuple[int, bytes]:
        with cluster.create_job("retried") as job:
            actor = job.train_deployment("actor", MODEL)
            rollout = tail_rollout(job, actor, plexrl.BoundedStaleness(0))
            grading = Grading(failures_max=2 if has_faults else 0)
            graded = rewards.Graded(grading, on_failure="raise", retries=2)
            canceller = Canceller(embedded, job, rollout)
            if has_faults:
                canceller.start()
            batches = trained(rollout, actor, islice(prompts(), STEPS * PROMPTS), graded)
            canceller.is_over.set()
            assert bool(grading.failed) == has_faults
            assert rollout.status()["dropped"] == 0
            check(batches, 0)
            return failed_generations(rollout), checkpoint_weights(actor)

    _, expected = run(has_faults=False)
    # All generations of a run may have ended before they could be cancelled.
    for _ in range(RUNS_MAX):
        failed, weights = run(has_faults=True)
        assert weights == expected
        if failed:
            return
    pytest.fail(f"no generation could be cancelled in {RUNS_MAX} runs")


@pytest.mark.parametrize(
    "policy",
    [
        plexrl.TailBatching(over_launch=1.5, fixed_over_launch=True),
        pytest.param(
            plexrl.TailBatching(
                over_launch_prompts=2, over_launch_responses=1, fixed_over_launch=True
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_prompts_that_cannot_be_generated_or_graded_are_dropped_whole(
    cluster: plexrl.Cluster, policy: plexrl.TailBatching
) -> None:
    def rows() -> Iterator[list[int]]:
        for number, prompt in enumerate(prompts()):
            # No engine has room for more than 512 tokens.
            yield [*prompt, *[5] * 600] if is_faulty(number, 3) else prompt

    with cluster.create_job("dropped") as job:
        actor = job.train_deployment("actor", MODEL)
        rollout = tail_rollout(job, actor, policy)
        grading = Grading(failures_max=1000)
        batches = trained(rollout, actor, rows(), rewards.Graded(grading, on_failure="drop"))
        check(batches, 0)
        status = rollout.status()
        weights = checkpoint_weights(actor)
    used = {number for batch in batches for number in batch.prompt_numbers}
    assert not [number for number in used for kind in range(4) if is_faulty(number, kind)]
    assert len(grading.failed) >= 3
    assert status["totals"]["failed_generations"] >= 3
    # No prompt is dropped because of another one.
    given = range(status["next_group"])
    assert status["dropped"] <= sum(is_faulty(each, kind) for each in given for kind in range(4))
    assert trained_again(cluster, batches, policy) == weights
