"""Shared actions on and observations of a live cluster."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster

VOCABULARY = "0123456789sr="
DEADLINE_S = 60.0


def wait_until(what: Callable[[], bool], message: str, limit_s: float = DEADLINE_S) -> None:
    """Poll until `what` holds; fails after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


def process_of(embedded: EmbeddedCluster, module: str) -> psutil.Process:
    """The process of the part that runs `module`; waits if it is restarting."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in psutil.Process(embedded.pid).children():
            try:
                if f"-m {module} " in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return bool(found)

    wait_until(look, f"no process runs {module}")
    return found[0]


def has_ended(process: psutil.Process) -> bool:
    """Whether the process runs no more; it may wait for its parent to notice."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


AnyDeployment = plexrl.TrainDeployment | plexrl.RolloutDeployment | plexrl.ReferenceDeployment


def rank_process(deployment: AnyDeployment, rank: int) -> psutil.Process:
    """The process of one rank: the one that listens on its socket."""
    address = (deployment.status()["ranks"][rank]["address"] or "").removeprefix("unix:")
    for process in psutil.process_iter():
        try:
            if any(each.laddr == address for each in process.net_connections(kind="unix")):
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError(f"nobody listens on {address}")


def kill_worker(deployment: AnyDeployment, rank: int) -> None:
    """`kill -9` the process of one rank."""
    rank_process(deployment, rank).kill()


def some_batch(seed: int, rows: int = 12) -> plexrl.Batch:
    """A batch of random rows for a policy loss."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 16, 5).tolist() for _ in range(rows)]
    completions = [rng.integers(3, 16, int(rng.integers(2, 7))).tolist() for _ in range(rows)]
    return plexrl.Batch.from_completions(
        prompts,
        completions,
        logprobs=[rng.normal(-2.5, 0.1, len(row)) for row in completions],
        advantages=[np.full(len(row), rng.normal()) for row in completions],
    )


def checkpoint_weights(actor: plexrl.TrainDeployment, name: str = "end") -> bytes:
    """The bytes of the deployment's weights, from a checkpoint."""
    path = Path(actor.save_checkpoint(name).result(120)["path"])
    return (path / "model.safetensors").read_bytes()


def paused_in_the_middle(
    rollout: plexrl.RolloutDeployment, begin: Callable[[], plexrl.GenerateFuture], running: int
) -> plexrl.GenerateFuture:
    """A generation that is paused with `running` samples, after each engine has drawn some tokens.
    A generation that ends before the pause is repeated."""

    def drawn() -> list[int]:
        return [each["tokens_drawn"] for each in rollout.status()["engines"]]

    deadline = time.monotonic() + DEADLINE_S
    while True:
        before = drawn()
        future = begin()

        def under_way(future: plexrl.GenerateFuture = future, before: list[int] = before) -> bool:
            now = drawn()
            added = zip(now, before or [0] * len(now), strict=True) if now else ()
            return future.done() or (bool(now) and all(last >= one + 8 for last, one in added))

        wait_until(under_way, "nothing is drawn")
        if sum(engine["running"] for engine in rollout.pause()) == running:
            return future
        rollout.resume()
        assert time.monotonic() < deadline, "it always ends before it is stopped"


def train(actor: plexrl.TrainDeployment, step: int) -> plexrl.Future[plexrl.StepResult]:
    """One step on a batch of its own."""
    actor.forward_backward(some_batch(step), plexrl.losses.grpo())
    return actor.optim_step(learning_rate=1e-2)


def weights_after(embedded: EmbeddedCluster, model: plexrl.ModelSpec, steps: int) -> bytes:
    """The weights after `steps` steps without a fault."""
    with (
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("undisturbed") as job,
    ):
        actor = job.train_deployment("actor", model, workers=2)
        for step in range(steps):
            train(actor, step)
        return checkpoint_weights(actor)
