"""One job of the fault suites, as a researcher would write it: `python controller.py NAME`.

Prints `ready` once its models are there and goes on when its standard input has a line, so that
all jobs run at the same time; `accepted ID` after the cluster has accepted an operation, `step N`
after every step and `weights PATH` at the end. Most
futures are never read: a failure that nobody would notice must end the job, not change its
weights. The same name, workers and steps give the same weights, bit for bit, on every cluster.

A name is a kind of job, and a number for another job of the kind: `trainer`, `trainer-2`. With
`--steps 0` a line `until N` on standard input says how many steps the job has.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import plexrl

VOCABULARY = "0123456789sr="
STEPS = 30
PAUSE_S = 0.2
LIMIT_S = 1800.0


def batch_of(seed: int, rows: int = 12) -> plexrl.Batch:
    """Random rows for a policy loss."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 16, 5).tolist() for _ in range(rows)]
    completions = [rng.integers(3, 16, int(rng.integers(2, 7))).tolist() for _ in range(rows)]
    return plexrl.Batch.from_completions(
        prompts,
        completions,
        logprobs=[rng.normal(-2.5, 0.1, len(row)) for row in completions],
        advantages=[np.full(len(row), rng.normal()) for row in completions],
    )


@dataclass(slots=True)
class Run:
    """One run of a job."""

    job: plexrl.Job
    workers: int
    fixed_steps: int
    """0: as many as standard input says."""
    pause_s: float
    """Time between two steps, in which the job leaves the GPUs to the others."""
    number: int
    """Which job of its kind: other weights and other batches."""
    last: int | None = None
    """Number of steps, once standard input has said it."""

    def seed(self, base: int) -> int:
        return base + 1000 * self.number

    def steps(self) -> Iterator[int]:
        """Wait for the other jobs, then count steps."""
        tell("ready")
        sys.stdin.readline()
        if self.fixed_steps:
            yield from range(self.fixed_steps)
            return
        threading.Thread(target=self._read_last, daemon=True).start()
        step = 0
        while self.last is None or step < self.last:
            yield step
            step += 1

    def report(self, step: int) -> None:
        """Tell of a step, and leave the GPUs to the others for as long as a rollout would."""
        time.sleep(self.pause_s)
        tell(f"step {step}")

    def _read_last(self) -> None:
        for line in sys.stdin:
            if line.startswith("until "):
                self.last = int(line.removeprefix("until "))


def policy_gradient(run: Run) -> plexrl.TrainDeployment:
    """A trainer, and a rollout whose samples depend on every weight sync."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=run.seed(6))
    actor = run.job.train_deployment("actor", model, workers=run.workers)
    rollout = run.job.rollout_deployment("rollout", model)
    rollout.sync_weights(actor).result(LIMIT_S)
    for step in run.steps():
        prompts = [[3 + step % 8, 4, 5 + prompt] for prompt in range(4)]
        sampling = plexrl.SamplingParams(max_tokens=8, seed=run.seed(step))
        samples = rollout.generate(prompts, n=4, sampling=sampling).result(LIMIT_S).samples
        rewards = np.array([[sum(s.tokens) % 7 for s in group] for group in samples], dtype=float)
        advantages = rewards - rewards.mean(axis=1, keepdims=True)
        batch = plexrl.Batch.from_samples(prompts, samples, advantages)
        tell_accepted(actor.forward_backward(batch, plexrl.losses.grpo()))
        tell_accepted(actor.optim_step(learning_rate=1e-3, grad_clip_norm=1.0))
        tell_accepted(rollout.sync_weights(actor))
        run.report(step)
    return actor


def trainer(run: Run) -> plexrl.TrainDeployment:
    """Shares its GPUs with the first job's trainer."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=run.seed(7))
    actor = run.job.train_deployment("actor", model, workers=run.workers)
    actor.barrier().result(LIMIT_S)
    for step in run.steps():
        tell_accepted(actor.forward_backward(batch_of(run.seed(step)), plexrl.losses.grpo()))
        tell_accepted(actor.optim_step(learning_rate=1e-2))
        # Without any answer read it would be far ahead of the cluster.
        actor.barrier().result(LIMIT_S)
        run.report(step)
    return actor


def host_optimizer(run: Run) -> plexrl.TrainDeployment:
    """The third on the same GPUs; its optimizer state lies in host memory."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=run.seed(8))
    actor = run.job.train_deployment("actor", model, workers=run.workers, optimizer="host")
    actor.barrier().result(LIMIT_S)
    for step in run.steps():
        actor.forward_backward(batch_of(run.seed(100 + step)), plexrl.losses.grpo())
        actor.forward_backward(batch_of(run.seed(200 + step)), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-2)
        actor.barrier().result(LIMIT_S)
        run.report(step)
    return actor


def latecomer(run: Run) -> plexrl.TrainDeployment:
    """Wants the GPUs of the three for itself: its poll stays open until they have ended."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=9)
    actor = run.job.train_deployment("actor", model, workers=run.workers, exclusive=True)
    tell("ready")
    actor.forward_backward(batch_of(9), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result(LIMIT_S)
    return actor


JOBS: dict[str, Callable[[Run], plexrl.TrainDeployment]] = {
    "policy": policy_gradient,
    "trainer": trainer,
    "offload": host_optimizer,
}
LATE = {"latecomer": latecomer}


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tell_accepted(future: "plexrl.Future[Any]") -> None:
    tell(f"accepted {future.operation}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pause-s", type=float, default=PAUSE_S)
    options = parser.parse_args()
    kind, _, number = options.name.partition("-")
    with plexrl.connect() as cluster, cluster.create_job(options.name, job_id=options.name) as job:
        number_of_kind = int(number or "1") - 1
        run = Run(job, options.workers, options.steps, options.pause_s, number_of_kind)
        saved = {**JOBS, **LATE}[kind](run).save_checkpoint("end").result(LIMIT_S)
        tell(f"weights {saved['path']}/model.safetensors")


if __name__ == "__main__":
    main()
