"""The scheduler knows of state that had to leave host memory, and what its load costs then."""

from pathlib import Path

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from tests.cluster.tools import VOCABULARY, some_batch, wait_until

HOST_BYTES = 2 << 20
"""Room for the state of one of the jobs, and not of two."""


def step(actor: plexrl.TrainDeployment, seed: int) -> None:
    actor.forward_backward(some_batch(seed), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result()


def test_a_state_that_was_spilled_is_seen_to_lie_on_nvme(tmp_path: Path) -> None:
    running = start_embedded(tmp_path, gpus_per_node=1, host_memory_bytes=HOST_BYTES)
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
                # What a load from there costs is known once there has been one.
                step(first, len(actors))
                assert first.status()["load_s"] != before["load_s"]
    finally:
        running.close()
