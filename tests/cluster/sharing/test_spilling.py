"""The scheduler tracks state that was spilled from host memory, and the cost of its load."""

from pathlib import Path

import pytest

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from tests.cluster.tools import VOCABULARY, some_batch, wait_until

HOST_BYTES = 2 << 20
"""Memory for the state of one of the jobs, but not of both."""


def step(actor: plexrl.TrainDeployment, seed: int) -> None:
    actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result()


@pytest.mark.slow
def test_spilled_state_is_shown_on_nvme(tmp_path: Path) -> None:
    running = start_embedded(tmp_path, virtual_gpus=1, host_memory_bytes=HOST_BYTES)
    try:
        with plexrl.connect(running.url, running.api_key) as cluster:
            model = plexrl.tiny_qwen2(VOCABULARY, seed=3)
            with (
                cluster.create_job("one") as one,
                cluster.create_job("two") as two,
                cluster.create_job("three") as three,
            ):
                jobs = (one, two, three)
                actors = [job.train_deployment("actor", model, workers=1) for job in jobs]
                first = actors[0]
                step(first, 0)
                before = first.status()
                assert before["nvme_bytes"] == 0
                for index, actor in enumerate(actors[1:]):
                    step(actor, index + 1)
                wait_until(lambda: first.status()["nvme_bytes"] > 0, "it was to be spilled")
                # The cost of a load from NVMe is measured by the first one.
                step(first, len(actors))
                assert first.status()["load_s"] != before["load_s"]
    finally:
        running.close()
