"""Switches that copy in both directions at once, and `kill -9` in the middle of them, change no
bit."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import plexrl
from tests.cluster.join.machines import Running
from tests.cluster.tools import VOCABULARY, checkpoint_weights, kill_worker, some_batch

MODEL = plexrl.tiny_qwen2(VOCABULARY, hidden=256, layers=4, seed=8)
STEPS = 8
Actor = plexrl.TrainDeployment


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, plexrl.Cluster]]:
    """A cluster whose GPU both jobs share; its memory has room for both states."""
    folder = tmp_path_factory.mktemp("switches")
    (folder / "cluster.toml").write_text(
        """
        [cluster]
        virtual_gpus = 1
        port = 0
        [scheduler]
        policy = "pack"
        [statemanager]
        device_bytes = "1 GiB"
        """
    )
    running = Running(folder / "head", "up", "--config", str(folder / "cluster.toml"))
    try:
        found = running.ready()
        with plexrl.connect(found["url"], found["api_key"]) as cluster:
            yield running, cluster
    finally:
        running.end()


def train(actor: Actor, seed: int, step: int) -> tuple[Any, ...]:
    loss = actor.forward_backward(some_batch(100 * seed + step), plexrl.losses.grpo())
    done = actor.optim_step(learning_rate=1e-2)
    return loss.result(120).metrics, done.result(120).metrics


def kill_daemon(running: Running) -> None:
    for process in psutil.Process(running.process.pid).children(recursive=True):
        if "plexrl.statemanager" in process.cmdline():
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError("no StateManager runs")


def kill_in_a_switch(
    actors: list[Actor], is_over: threading.Event, kill: Callable[[], None]
) -> None:
    """Kill as soon as a state is seen to move, or at the end."""
    while not is_over.is_set():
        if any(actor.status()["residency"] == "moving" for actor in actors):
            break
    kill()


@pytest.mark.slow
def test_kills_in_the_middle_of_switches_change_no_loss(
    head: tuple[Running, plexrl.Cluster],
) -> None:
    running, cluster = head
    wanted = []
    for seed in (1, 2):
        with cluster.create_job(f"alone{seed}") as job:
            actor = job.train_deployment("actor", MODEL, exclusive=True)
            losses = [train(actor, seed, step) for step in range(STEPS)]
            wanted.append((losses, checkpoint_weights(actor)))
    shared: list[list[tuple[Any, ...]]] = [[], []]
    with cluster.create_job("one") as one, cluster.create_job("two") as two:
        actors = [job.train_deployment("actor", MODEL) for job in (one, two)]
        kills: dict[int, Callable[[], None]] = {
            2: lambda: kill_daemon(running),
            3: lambda: kill_worker(actors[0], 0),
            5: lambda: kill_worker(actors[1], 0),
            6: lambda: kill_daemon(running),
        }
        with ThreadPoolExecutor(1) as pool:
            for step in range(STEPS):
                is_over, killed = threading.Event(), None
                if step in kills:
                    killed = pool.submit(kill_in_a_switch, actors, is_over, kills[step])
                for index, actor in enumerate(actors):
                    shared[index].append(train(actor, index + 1, step))
                is_over.set()
                if killed is not None:
                    killed.result(120)
        found = list(zip(shared, map(checkpoint_weights, actors), strict=True))
        loads = [json.loads(row["result_json"]) for row in cluster.operations(kind="load")]
    assert found == wanted
    assert any(each.get("prefetched_bytes") for each in loads), "no load was overlapped"
