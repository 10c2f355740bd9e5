"""Two GRPO jobs on a cluster whose only node has one GPU, one after the other and at once.

    python -m benchmarks.gpu.cluster [--quick] [--cpu] [--json]

A head, a node that has joined it, its workers and two controllers are processes and threads as
users start them. Each job has a trainer and a rollout of a random model of 190 million
parameters, and all four share the GPU. A step generates, waits for its rewards, which take
`REWARD_S` seconds as programs in a sandbox do, trains, and syncs the weights. One after the other,
the GPU is idle while a job waits; at once, the other job has it meanwhile. A job's trainer and
rollout take turns in both cases, so the ratio does not count what turns cost a job that could keep
both on the GPU: `benchmarks.gpu.rl` does. `--cpu` runs the same without a GPU, which is quick
together with `--quick`.
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import plexrl
from benchmarks.gpu.part import note, random_model
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.cluster.node.gpus import find_gpus
from tests.cluster.join.machines import Machines

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyz"
STEPS = sized(3, quick=1)
PROMPTS, SAMPLES = sized(16, quick=2), sized(8, quick=2)
PROMPT_TOKENS = 16
RESPONSE_TOKENS = sized(112, quick=6)
MICRO_BATCH_TOKENS = sized(2048, quick=256)
KV_CACHE_BYTES = sized(2 << 30, quick=None)
"""Enough for all samples at once."""
REWARD_S = sized(2.0, quick=0.1)
HOST_MEMORY = sized("16GiB", quick="256MiB")
RESULT_S = 200.0
"""Longest wait for an operation; the first one of a deployment starts its worker."""


class Controller:
    """A GRPO loop."""

    def __init__(self, cluster: plexrl.Cluster, seed: int) -> None:
        self._seed = seed
        self._job = cluster.create_job(f"job{seed}")
        model = random_model(VOCABULARY, seed)
        tokens = PROMPT_TOKENS + RESPONSE_TOKENS
        self._actor = self._job.train_deployment("actor", model, max_sequence_tokens=tokens)
        self._rollout = self._job.rollout_deployment(
            "rollout",
            model,
            max_sequence_tokens=tokens,
            kv_cache_bytes=KV_CACHE_BYTES,
            shares_gpus=True,
        )
        chance = np.random.default_rng(seed)
        self._prompts = chance.integers(3, 3 + len(VOCABULARY), (PROMPTS, PROMPT_TOKENS)).tolist()
        self.norms: list[float] = []
        """Gradient norm of each step."""

    def step(self) -> None:
        """One step. The reward counts the even tokens of a response."""
        sampling = plexrl.SamplingParams(
            max_tokens=RESPONSE_TOKENS, ignore_eos=True, seed=len(self.norms)
        )
        drawn = self._rollout.generate(self._prompts, n=SAMPLES, sampling=sampling)
        samples = drawn.result(RESULT_S).samples
        time.sleep(REWARD_S)
        rewards = np.array(
            [[np.mean([token % 2 == 0 for token in one.tokens]) for one in row] for row in samples]
        )
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1)[:, None] + 1e-6)
        batch = plexrl.Batch.from_samples(self._prompts, samples, advantages)
        loss = plexrl.losses.grpo()
        self._actor.forward_backward(batch, loss, micro_batch_tokens=MICRO_BATCH_TOKENS)
        stepped = self._actor.optim_step(learning_rate=1e-5, grad_clip_norm=1.0)
        self._rollout.sync_weights(self._actor).result(RESULT_S)
        self.norms.append(float(stepped.result(RESULT_S).metrics["grad_norm"]))

    def steps(self) -> None:
        """Several steps."""
        for _ in range(STEPS):
            self.step()

    def end(self) -> None:
        """End the job."""
        self._job.finish()


def measure(cluster: plexrl.Cluster) -> dict[str, float]:
    """The figures."""
    controllers = [Controller(cluster, seed) for seed in (1, 2)]
    with ThreadPoolExecutor(len(controllers)) as threads:
        # Workers start, and CUDA graphs are captured.
        list(threads.map(Controller.step, controllers))
        note("the workers have started")
        started = time.perf_counter()
        for each in controllers:
            each.steps()
        isolated_s = time.perf_counter() - started
        note("one after the other")
        started = time.perf_counter()
        list(threads.map(Controller.steps, controllers))
        shared_s = time.perf_counter() - started
    norms = [norm for each in controllers for norm in each.norms]
    assert np.isfinite(norms).all(), norms
    for each in controllers:
        each.end()
    steps = len(controllers) * STEPS
    return {
        "gpu_seconds_step_isolated": isolated_s / steps,
        "gpu_seconds_step_shared": shared_s / steps,
        "gpu_seconds_ratio": shared_s / isolated_s,
        "reward_s": REWARD_S,
    }


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one step")
    parser.add_argument("--cpu", action="store_true", help="the same without a GPU")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    if not wanted.cpu and not find_gpus().count:
        sys.stdout.write("no GPU here, so nothing was measured\n")
        return
    with tempfile.TemporaryDirectory(prefix="plexrl-gpu-") as folder:
        machines = Machines(Path(folder))
        try:
            machines.start_head()
            gpus = 1 if wanted.cpu else None
            machines.start_node("gpu0", gpus=gpus, host_memory=HOST_MEMORY).ready()
            with machines.connect() as cluster:
                figures = measure(cluster)
        except BaseException:
            logs = [*Path(folder).rglob("*.log"), *Path(folder).glob("*.err")]
            for log in sorted(logs, key=lambda each: each.stat().st_mtime):
                sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}\n")
            raise
        finally:
            machines.close()
    rows = [[name, f"{value:.6g}"] for name, value in figures.items()]
    report(f"Two jobs of a cluster, {STEPS} steps each", ["figure", "value"], rows, figures)


if __name__ == "__main__":
    main()
