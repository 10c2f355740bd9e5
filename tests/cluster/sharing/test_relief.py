"""A job that waits more than it accepts gets GPUs of its own, and computes the same bits."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import plexrl
from tests.cluster.join.machines import Running
from tests.cluster.tools import VOCABULARY, checkpoint_weights, some_batch

STEPS = 16
SLO = 0.1


@pytest.fixture(scope="module")
def relieving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[plexrl.Cluster]:
    """Two GPUs; `pack` puts both jobs on one, because nothing is known of them yet."""
    folder = tmp_path_factory.mktemp("relief")
    (folder / "cluster.toml").write_text(
        f"""
        [cluster]
        virtual_gpus = 2
        port = 0
        [scheduler]
        policy = "pack"
        relief_after_s = 0.0
        waiting_part_max = {SLO}
        """
    )
    head = Running(folder / "head", "up", "--config", str(folder / "cluster.toml"))
    try:
        found = head.ready()
        with plexrl.connect(found["url"], found["api_key"]) as cluster:
            yield cluster
    finally:
        head.end()


def train(actor: plexrl.TrainDeployment, seed: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        actor.forward_backward(some_batch(100 * seed + step), plexrl.losses.grpo())
        norms.append(actor.optim_step(learning_rate=1e-2).result(120).metrics["grad_norm"])
    return norms


@pytest.mark.slow
def test_a_job_over_its_bound_is_moved_and_computes_the_same_bits(
    relieving: plexrl.Cluster,
) -> None:
    model = plexrl.tiny_qwen2(VOCABULARY, seed=3)
    wanted = []
    for seed in (1, 2):
        with relieving.create_job(f"alone{seed}") as job:
            actor = job.train_deployment("actor", model, workers=1, exclusive=True)
            wanted.append((train(actor, seed), checkpoint_weights(actor)))

    with ExitStack() as scope:
        jobs = [scope.enter_context(relieving.create_job(f"job{n}", slo=SLO)) for n in (1, 2)]
        actors = [job.train_deployment("actor", model, workers=1) for job in jobs]
        for actor in actors:
            actor.barrier().result(120)
        before = [actor.status()["group"] for actor in actors]
        with ThreadPoolExecutor(2) as pool:
            norms = list(pool.map(train, actors, (1, 2)))
        found = list(zip(norms, map(checkpoint_weights, actors), strict=True))
        after = [actor.status()["group"] for actor in actors]
        reasons = [job.explain()["deployments"][0]["moved_because"] for job in jobs]

    assert before[0] == before[1], "the two jobs were to share a group"
    assert after[0] != after[1], "neither was moved"
    (reason,) = filter(None, reasons)
    assert reason.startswith("waited ")
    assert reason.endswith(f"the bound is {SLO:.0%}")
    assert found == wanted
