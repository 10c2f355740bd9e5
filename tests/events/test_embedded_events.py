"""Events of a whole cluster: a job trains, and `plexrl events` follows it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from tests.cluster.tools import VOCABULARY, some_batch
from tests.events.mosquitto import Mosquitto, Subscriber


def test_a_training_job_is_followed_from_its_start_to_its_end(
    tmp_path: Path, broker: Mosquitto
) -> None:
    url = f"{broker.url}/site/one"
    embedded = start_embedded(tmp_path / "data", virtual_gpus=2, mqtt=url)
    try:
        with Subscriber(broker.port, "site/one/#") as events, following(url) as lines:
            with (
                plexrl.connect(embedded.url, embedded.api_key) as cluster,
                cluster.create_job("observed") as job,
            ):
                actor = job.train_deployment("actor", plexrl.tiny_qwen2(VOCABULARY, seed=5))
                actor.forward_backward(some_batch(1), plexrl.losses.grpo())
                actor.optim_step(learning_rate=1e-3).result(120)
                name = f"site/one/jobs/operator/{job.job}"
                # A message has the newest state, so a short one may have none: not all are seen.
                events.wait(
                    lambda: (events.state(name) or {}).get("state") in {"PROFILING", "ADMITTED"}
                )
                published = cluster.status()["events"]
                assert published is not None
                assert published["connected"]
            ended = events.wait_state(name, "COMPLETED")
            assert ended["deployments"][0]["deployment"] == f"{job.job}/actor"
            assert events.states(name)[-1] == "COMPLETED"
            assert events.state("site/one/nodes/node0")["gpus"] == 2
            followed = [json.loads(line) for line in until_ended(lines)]
            assert followed[-1] == {"topic": f"jobs/operator/{job.job}", "event": ended}
            embedded.close()
            assert events.wait_state("site/one/scheduler", "offline")["why"] == (
                "the scheduler was stopped"
            )
    finally:
        embedded.close()


@contextmanager
def following(url: str) -> Iterator[Iterator[bytes]]:
    """The lines of `plexrl events jobs`."""
    command = [sys.executable, "-m", "plexrl.cli.app", "events", "--mqtt", url, "--json", "jobs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            process.terminate()


def until_ended(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The lines up to that of a completed job."""
    for line in lines:
        yield line
        if b"COMPLETED" in line:
            return
