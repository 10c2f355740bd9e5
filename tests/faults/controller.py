"""One job of the fault suite, as a researcher would write it: `python controller.py NAME`.

Prints `ready` once its models are there and goes on when its standard input has a line, so that
all jobs run at the same time; `step N` after every step and `weights PATH` at the end. Most
futures are never read: a failure that nobody would notice must end the job, not change its
weights. The same name gives the same weights, bit for bit, on every undisturbed cluster.
"""

import sys
import time
from pathlib import Path

import numpy as np

import plexrl

VOCABULARY = "0123456789sr="
STEPS = 30
ROLLOUT_S = 0.2
LIMIT_S = 600.0


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


def policy_gradient(job: plexrl.Job) -> plexrl.TrainDeployment:
    """Two ranks, and a rollout whose samples depend on every weight sync."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=6)
    actor = job.train_deployment("actor", model, workers=2)
    rollout = job.rollout_deployment("rollout", model)
    rollout.sync_weights(actor).result(LIMIT_S)
    wait_for_the_others()
    for step in range(STEPS):
        prompts = [[3 + step % 8, 4, 5 + prompt] for prompt in range(4)]
        sampling = plexrl.SamplingParams(max_tokens=8, seed=step)
        samples = rollout.generate(prompts, n=4, sampling=sampling).result(LIMIT_S).samples
        rewards = np.array([[sum(s.tokens) % 7 for s in group] for group in samples], dtype=float)
        advantages = rewards - rewards.mean(axis=1, keepdims=True)
        batch = plexrl.Batch.from_samples(prompts, samples, advantages)
        actor.forward_backward(batch, plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-3, grad_clip_norm=1.0)
        rollout.sync_weights(actor)
        report(step)
    return actor


def trainer(job: plexrl.Job) -> plexrl.TrainDeployment:
    """Two ranks that share their GPUs with the first job's trainer."""
    actor = job.train_deployment("actor", plexrl.tiny_qwen2(VOCABULARY, seed=7), workers=2)
    actor.barrier().result(LIMIT_S)
    wait_for_the_others()
    for step in range(STEPS):
        actor.forward_backward(batch_of(step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-2)
        # Without any answer read it would be far ahead of the cluster.
        actor.barrier().result(LIMIT_S)
        report(step)
    return actor


def host_optimizer(job: plexrl.Job) -> plexrl.TrainDeployment:
    """The third on the same GPUs; its optimizer state lies in host memory."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=8)
    actor = job.train_deployment("actor", model, workers=2, optimizer="host")
    actor.barrier().result(LIMIT_S)
    wait_for_the_others()
    for step in range(STEPS):
        actor.forward_backward(batch_of(100 + step), plexrl.losses.grpo())
        actor.forward_backward(batch_of(200 + step), plexrl.losses.grpo())
        actor.optim_step(learning_rate=1e-2)
        actor.barrier().result(LIMIT_S)
        report(step)
    return actor


def latecomer(job: plexrl.Job) -> plexrl.TrainDeployment:
    """Wants the GPUs of the three for itself: its poll stays open until they have ended."""
    model = plexrl.tiny_qwen2(VOCABULARY, seed=9)
    actor = job.train_deployment("actor", model, workers=2, exclusive=True)
    tell("ready")
    actor.forward_backward(batch_of(9), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result(LIMIT_S)
    return actor


JOBS = {"policy": policy_gradient, "trainer": trainer, "offload": host_optimizer}
LATE = {"latecomer": latecomer}


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def wait_for_the_others() -> None:
    tell("ready")
    sys.stdin.readline()


def report(step: int) -> None:
    """Tell of a step, and leave the GPUs to the others for as long as a rollout would."""
    time.sleep(ROLLOUT_S)
    tell(f"step {step}")


def main(name: str) -> None:
    with plexrl.connect() as cluster, cluster.create_job(name, job_id=name) as job:
        saved = {**JOBS, **LATE}[name](job).save_checkpoint("end").result(LIMIT_S)
        tell(f"weights {Path(saved['path']) / 'model.safetensors'}")


if __name__ == "__main__":
    main(sys.argv[1])
