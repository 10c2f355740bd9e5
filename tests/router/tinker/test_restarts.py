"""Clients of the Tinker API outlive the router; what they hold does not outlive them."""

import threading
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import process_of, wait_until
from tests.router.tinker.clients import LIMIT_S, ROWS, Tenant, prompt, supervised

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
STEP = types.AdamParams(learning_rate=0.02)


def losses(trainer: tinker.TrainingClient, steps: int) -> list[float]:
    """Losses of a loop that submits all its steps at once."""
    futures = []
    for _ in range(steps):
        futures.append(trainer.forward_backward(supervised(), "cross_entropy"))
        trainer.optim_step(STEP)
    return [each.result(LIMIT_S).metrics["loss:sum"] for each in futures]


def test_a_router_that_is_killed_loses_and_doubles_no_step(
    cluster: EmbeddedCluster, tenant: Tenant
) -> None:
    with tenant.service() as client:
        made = client.create_lora_training_client
        undisturbed = made(base_model="tiny", rank=4, seed=3).result(LIMIT_S)
        wanted = losses(undisturbed, 8)
        trainer = made(base_model="tiny", rank=4, seed=3).result(LIMIT_S)
        found = losses(trainer, 2)
        results: list[float] = []
        loop = threading.Thread(target=lambda: results.extend(losses(trainer, 6)))
        loop.start()
        process_of(cluster, "plexrl.router").kill()
        loop.join(LIMIT_S)
        assert [*found, *results] == wanted
        sampler = trainer.save_weights_and_get_sampling_client().result(LIMIT_S)
        process_of(cluster, "plexrl.router").kill()
        scores = sampler.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S)
        now = trainer.forward(supervised(), "cross_entropy").result(LIMIT_S)
        wanted_row = now.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert np.allclose(np.array(scores[1:], np.float32), wanted_row, atol=1e-4)


def test_no_poll_is_answered_with_an_error_of_the_server_while_the_scheduler_restarts(
    cluster: EmbeddedCluster, tenant: Tenant
) -> None:
    with tenant.service() as client, tenant.http() as http:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4).result(LIMIT_S)
        trainer.forward_backward(supervised(), "cross_entropy").result(LIMIT_S)
        step = {"model_id": trainer.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
        request = {"request_id": http.post("/optim_step", json=step).json()["request_id"]}
        process_of(cluster, "plexrl.scheduler").kill()
        answers: list[Any] = []

        def is_answered() -> bool:
            answers.append(http.post("/retrieve_future", json=request))
            return "metrics" in answers[-1].json()

        wait_until(is_answered, "the step did not end")
        # After 429 the SDK waits before it polls again; after 5xx it does not.
        assert {each.status_code for each in answers} <= {200, 429}


def test_a_client_with_adapters_and_one_with_all_parameters_train_as_if_alone(
    tenant: Tenant,
) -> None:
    def trained(rank: int) -> list[float]:
        with tenant.service() as client:
            made = client.create_lora_training_client(base_model="tiny", rank=rank, seed=5)
            trainer = made.result(LIMIT_S)
            found = losses(trainer, 6)
            sampler = trainer.save_weights_and_get_sampling_client().result(LIMIT_S)
            scores = sampler.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S)
            return [*found, *(each for each in scores if each is not None)]

    alone = {rank: trained(rank) for rank in (0, 4)}
    together: dict[int, list[float]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: together.update({rank: trained(rank)}))
        for rank in (0, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert together == alone
