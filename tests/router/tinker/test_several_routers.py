"""Clients of the SDK behind a load balancer, whose requests reach any of several routers."""

import threading

import pytest
import tinker
from tinker import types

from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import process_of
from tests.router.tinker.clients import LIMIT_S, ROWS, Tenant, prompt, supervised
from tests.router.tinker.load_balancer import LoadBalancer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
STEP = types.AdamParams(learning_rate=0.02)


def losses(trainer: tinker.TrainingClient, steps: int) -> list[float]:
    """Losses of a loop that submits all its steps at once."""
    futures = []
    for _ in range(steps):
        futures.append(trainer.forward_backward(supervised(), "cross_entropy"))
        trainer.optim_step(STEP)
    return [each.result(LIMIT_S).metrics["loss:sum"] for each in futures]


def trained(tenant: Tenant) -> list[float]:
    """Losses of a loop, and logprobs under the weights before and after it, in turns."""
    with tenant.service() as client:
        made = client.create_lora_training_client(base_model="tiny", rank=4, seed=3)
        trainer = made.result(LIMIT_S)
        found = losses(trainer, 4)
        before = trainer.save_weights_and_get_sampling_client().result(LIMIT_S)
        found += losses(trainer, 4)
        after = trainer.save_weights_and_get_sampling_client().result(LIMIT_S)
        asked = [each.compute_logprobs(prompt(ROWS[0])) for each in (before, after) * 3]
        for future in asked:
            found += [each for each in future.result(LIMIT_S) if each is not None]
        return found


def test_a_loop_through_two_routers_is_that_through_one(
    routers: EmbeddedCluster, lab: Tenant, balancer: tuple[str, LoadBalancer]
) -> None:
    alone = Tenant(url=routers.url.split(",")[0], key=lab.key)
    wanted = trained(alone)
    balancer[1].served.clear()
    assert trained(lab) == wanted
    one, other = balancer[1].served.values()
    assert min(one, other) > 20


def test_one_of_two_routers_is_killed_again_and_again_and_no_step_is_lost_or_doubled(
    routers: EmbeddedCluster, lab: Tenant
) -> None:
    with lab.service() as client:
        made = client.create_lora_training_client
        wanted = losses(made(base_model="tiny", rank=4, seed=3).result(LIMIT_S), 12)
        trainer = made(base_model="tiny", rank=4, seed=3).result(LIMIT_S)
        found = losses(trainer, 2)
        results: list[float] = []
        loop = threading.Thread(target=lambda: results.extend(losses(trainer, 10)))
        loop.start()
        for _ in range(3):
            process_of(routers, "plexrl.router").kill()
        loop.join(LIMIT_S)
        assert [*found, *results] == wanted


def test_a_large_batch_of_many_parts_is_put_together_from_both_routers(
    routers: EmbeddedCluster, lab: Tenant
) -> None:
    rows = [[3 + (number + at) % 10 for at in range(8)] for number in range(2500)]

    def stepped(tenant: Tenant) -> list[float]:
        with tenant.service() as client:
            made = client.create_lora_training_client(base_model="tiny", rank=4, seed=3)
            trainer = made.result(LIMIT_S)
            parts = trainer.forward_backward(supervised(rows), "cross_entropy")
            trainer.optim_step(STEP)
            after = trainer.forward(supervised(), "cross_entropy").result(LIMIT_S)
            return [parts.result(LIMIT_S).metrics["loss:sum"], after.metrics["loss:sum"]]

    alone = Tenant(url=routers.url.split(",")[0], key=lab.key)
    assert stepped(lab) == stepped(alone)
