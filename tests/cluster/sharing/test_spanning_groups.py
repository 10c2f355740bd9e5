"""Trainings that lie on their own rollouts' GPUs and share others, and a small job on a part of
these: all come out as alone, also after `kill -9` of each."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from tests.cluster.sharing.test_shared_rollouts import MODEL, STEPS, Trainee
from tests.cluster.tools import checkpoint_weights, kill_worker, train

WORKERS = 3
"""Of each training; its rollout has one."""


@pytest.fixture(scope="module")
def four_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[plexrl.Cluster]:
    folder = tmp_path_factory.mktemp("four-gpus")
    running = start_embedded(folder, virtual_gpus=4, policy="spread+backfill")
    try:
        with plexrl.connect(running.url, running.api_key) as cluster:
            yield cluster
    finally:
        running.close()


def busy(offset_s: float, duration_s: float) -> plexrl.DemandTrace:
    segment = plexrl.Segment(offset_s=offset_s, duration_s=duration_s)
    return plexrl.DemandTrace(period_s=20.0, segments=(segment,))


def begun(scope: ExitStack, cluster: plexrl.Cluster, seed: int, *, shares: bool | None) -> Trainee:
    """A synchronous job that has its GPUs; `shares` as `shares_gpus`."""
    job = scope.enter_context(cluster.create_job(f"job-{seed}", gang=2))
    actor = job.train_deployment(
        "actor", MODEL, workers=WORKERS, trace=busy(16.0, 2.0), exclusive=shares is False
    )
    trace = None if shares is False else busy(0.0, 15.0)
    rollout = job.rollout_deployment("rollout", MODEL, shares_gpus=shares, trace=trace)
    return Trainee(seed, actor, rollout)


def gpus(deployment: plexrl.TrainDeployment | plexrl.RolloutDeployment) -> set[tuple[str, int]]:
    return {(rank["node"], rank["gpu"]) for rank in deployment.status()["ranks"]}


def small_weights(cluster: plexrl.Cluster) -> bytes:
    with cluster.create_job("small") as job:
        actor = job.train_deployment("actor", MODEL, workers=1, exclusive=True)
        for step in range(STEPS):
            train(actor, step)
        return checkpoint_weights(actor)


@pytest.mark.slow
def test_trainings_that_span_groups_and_a_small_job_in_one_come_out_as_alone(
    four_gpus: plexrl.Cluster,
) -> None:
    cluster, expected = four_gpus, {}
    for seed in (1, 2):
        with ExitStack() as scope:
            alone = begun(scope, cluster, seed, shares=False)
            for _ in range(STEPS):
                alone.begin_step()
                alone.end_step()
            expected[seed] = alone.history, checkpoint_weights(alone.actor)
    small = small_weights(cluster)
    with ExitStack() as scope:
        one, two = (begun(scope, cluster, seed, shares=True) for seed in (1, 2))
        job = scope.enter_context(cluster.create_job("small-shared"))
        actor = job.train_deployment("actor", MODEL, workers=1, trace=busy(0.0, 2.0))
        one.begin_step()
        two.begin_step()
        train(actor, 0)
        one.end_step()
        two.end_step()
        assert gpus(one.rollout) < gpus(one.actor)
        assert gpus(two.rollout) < gpus(two.actor)
        assert len(gpus(one.actor) & gpus(two.actor)) == 2
        assert gpus(actor) < gpus(one.actor) & gpus(two.actor)
        assert len(one.actor.status()["groups"]) == 3
        for killed in (one.actor, two.rollout, actor):
            kill_worker(killed, 0)
        one.begin_step()
        two.begin_step()
        train(actor, 1)
        one.end_step()
        two.end_step()
        assert checkpoint_weights(actor) == small
        for each in (one, two):
            assert (each.history, checkpoint_weights(each.actor)) == expected[each.seed]


@pytest.mark.slow
def test_a_small_job_takes_a_part_of_a_running_trainings_gpus(four_gpus: plexrl.Cluster) -> None:
    small = small_weights(four_gpus)
    with four_gpus.create_job("alone") as job:
        alone = job.train_deployment("actor", MODEL, workers=4, exclusive=True)
        for step in range(STEPS):
            train(alone, step)
        large = checkpoint_weights(alone)
    with four_gpus.create_job("large") as job, four_gpus.create_job("small") as other:
        wide = job.train_deployment("actor", MODEL, workers=4, trace=busy(0.0, 2.0))
        train(wide, 0).result(120)
        narrow = other.train_deployment("actor", MODEL, workers=1, trace=busy(10.0, 2.0))
        train(narrow, 0)
        train(wide, 1)
        train(narrow, 1)
        assert checkpoint_weights(wide) == large
        assert checkpoint_weights(narrow) == small
        assert gpus(narrow) < gpus(wide)


@pytest.mark.slow
def test_a_rollout_gives_its_gpu_to_a_job_that_waits_and_trains_as_before(
    four_gpus: plexrl.Cluster,
) -> None:
    cluster, steps = four_gpus, 4
    with ExitStack() as scope:
        alone = begun(scope, cluster, 3, shares=False)
        for _ in range(steps):
            alone.begin_step()
            alone.end_step()
        expected = alone.history, checkpoint_weights(alone.actor)
    with ExitStack() as scope:
        one = begun(scope, cluster, 3, shares=None)
        one.begin_step()
        one.end_step()
        assert not gpus(one.rollout) & gpus(one.actor), "nobody waits, and they share"
        other = scope.enter_context(cluster.create_job("other"))
        waiting = other.train_deployment("actor", MODEL, workers=1, exclusive=True)
        assert not gpus(waiting)
        for _ in range(1, steps):
            one.begin_step()
            one.end_step()
        assert gpus(one.rollout) < gpus(one.actor)
        train(waiting, 0).result(120)
        assert (one.history, checkpoint_weights(one.actor)) == expected
