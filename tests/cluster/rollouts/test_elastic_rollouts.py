"""Instances that a real cluster adds and removes while a job trains, beside a fixed number, and
with `kill -9` of the service in the middle of both."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

import plexrl
from plexrl.client.blocking.bounded_rollout import BoundedRollout
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.wire.messages.rollout_views import RolloutStatus
from tests.cluster.rollouts.test_asynchronous_rollouts import (
    MODEL,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    prompts,
    reward,
    train,
)
from tests.cluster.tools import checkpoint_weights, process_of, some_batch, wait_until

STEPS_MAX = 40
LONG = replace(SAMPLING, max_tokens=100, ignore_eos=True)


def trained(
    job: plexrl.Job,
    policy: plexrl.BoundedStaleness,
    steps: int,
    meanwhile: Callable[[BoundedRollout, plexrl.TrainDeployment, float], bool],
) -> tuple[int, bytes, RolloutStatus]:
    """Train until `meanwhile`, which is called before each step with the seconds that its batch
    took, returns True. Returns the number of steps, the weights and the status."""
    actor = job.train_deployment("actor", MODEL)
    rollout = job.rollout(
        *("rollout", MODEL, actor),
        instances=1,
        policy=policy,
        prompts=PROMPTS,
        samples=SAMPLES,
        sampling=LONG,
    )
    done, asked_at = 0, time.monotonic()
    for batch in rollout.batches(prompts(), reward, steps=steps):
        is_last = meanwhile(rollout, actor, time.monotonic() - asked_at)
        train(actor, batch.prompts, batch.samples, batch.rewards)
        done += 1
        if is_last:
            break
        asked_at = time.monotonic()
    return done, checkpoint_weights(actor), rollout.status()


class Unbalanced:
    """Training takes next to no time until an instance was added, and then far longer than
    generation until it was removed."""

    def __init__(self, embedded: EmbeddedCluster, *, kills: bool) -> None:
        self._embedded = embedded
        self._kills = kills
        self._killed: list[str] = []
        self.reasons: dict[str, str] = {}

    def __call__(
        self, rollout: BoundedRollout, actor: plexrl.TrainDeployment, generation_s: float
    ) -> bool:
        status = rollout.status()
        changes = {"added": status["instances_added"], "removed": status["instances_removed"]}
        for change, count in changes.items():
            if count and change not in self.reasons:
                self.reasons[change] = status["instances_reason"]
                if self._kills:
                    process_of(self._embedded, "plexrl.rollout").kill()
        if status["instances_removed"]:
            return True
        if [each["state"] for each in status["instances"].values()] == ["joined"] * 2:
            # Its length is what counts, not what the trainer does.
            actor.forward(some_batch(0)).result(60)
            time.sleep(max(0.3, 2.5 * generation_s))
        return False


# `tests/rollout/test_service_balancing.py` adds and removes instances, also after a crash.
@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True])
def test_an_instance_comes_with_the_need_and_goes_with_it_and_the_weights_are_the_same(
    cluster: plexrl.Cluster, embedded: EmbeddedCluster, kills: bool
) -> None:
    reserved = cluster.status()["gpus_reserved"]
    load = Unbalanced(embedded, kills=kills)
    with cluster.create_job("elastic") as job:
        policy = plexrl.BoundedStaleness(0, elastic=plexrl.Elastic(min=1, max=2))
        steps, weights, status = trained(job, policy, STEPS_MAX, load)
        assert status["instances_added"] == status["instances_removed"] == 1, status
        assert "generation takes" in load.reasons["added"]
        assert load.reasons["removed"].startswith("rollout-1: ")
        # One of each, and the one that is not needed has ended.
        wait_until(lambda: cluster.status()["gpus_reserved"] == reserved + 2, "its GPU is not free")
        added = job.rollout_deployment("rollout-1", MODEL).status()
        assert added["state"] == "stopped"
        shown = [each["deployment"] for each in job.status()["deployments"]]
        assert shown == [f"{job.job}/actor", f"{job.job}/rollout-0"]
    with cluster.create_job("fixed") as job:
        wanted = trained(job, plexrl.BoundedStaleness(0), steps, lambda *_: False)
    assert (steps, weights) == wanted[:2]
