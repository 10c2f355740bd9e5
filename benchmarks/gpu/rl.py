"""Two RL jobs that take turns on one GPU, against the same jobs alone.

    python -m benchmarks.gpu.rl [--quick] [--cpu] [--json]

Each job has a trainer (fsdp, GRPO) and a rollout (the built-in engine) of a random model of about
190 million parameters. Shared, each of the four has the device in turn; weights go from trainer
to rollout by publish and pull. The rest of the device's memory is occupied, so that the states of
both jobs are larger than what is left. Alone, a job keeps both its parts on the device. Losses and
gradient norms must be equal, or the run fails. `--cpu` runs the same code without a GPU, which is
quick together with `--quick`.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.gpu.part import (
    Part,
    Place,
    backend_call,
    note,
    open_place,
    random_model,
)
from benchmarks.gpu.switch import GIB, running_daemon
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.errors import DeviceUnavailableError
from plexrl.losses import grpo
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.wire.operations import (
    AdamParams,
    ForwardBackwardParams,
    GenerateParams,
    OperationKind,
    SamplingParams,
    SyncWeightsParams,
)
from plexrl.wire.tensors import Arrays
from plexrl.worker.interface.backend import RolloutBackend

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyz"
STEPS = sized(4, quick=2)
PROMPTS, SAMPLES = sized(16, quick=2), sized(8, quick=2)
PROMPT_TOKENS = 16
RESPONSE_TOKENS = sized(112, quick=6)
MICRO_BATCH_ROWS = 8
HOST_BYTES = sized(6 * GIB, quick=GIB // 8)
"""Of the host tier, for each job."""
KV_CACHE_BYTES = sized(2 * GIB, quick=None)
"""Enough for all samples at once."""
LOSS = grpo()
ADAM = AdamParams(learning_rate=1e-5, grad_clip_norm=1.0)
SEEDS = (1, 2)
DIFFERENCE_MAX = 1e-6
"""Of a loss or gradient norm. All kernels of the training are deterministic, so 0 is expected."""


class Job:
    """A GRPO loop: generate, reward, train, sync."""

    def __init__(
        self, name: str, seed: int, node: StateManagerConfig, place: Place, *, shares: bool
    ) -> None:
        self._node = node
        self._name = name
        self._shares = shares
        self._prompts = np.random.default_rng(seed).integers(
            3, 3 + len(VOCABULARY), (PROMPTS, PROMPT_TOKENS), dtype=np.int32
        )
        common: dict[str, Any] = {
            "model": random_model(VOCABULARY, seed),
            "workers": 1,
            "max_sequence_tokens": PROMPT_TOKENS + RESPONSE_TOKENS,
        }
        trainer = DeploymentSpec(kind="train", backend="fsdp", **common)
        rollout = DeploymentSpec(
            kind="rollout", backend="torch", kv_cache_bytes=KV_CACHE_BYTES, **common
        )
        self.trainer = Part(trainer, name, node, place.device)
        self.rollout = Part(rollout, name, node, place.device)
        self.figures: list[float] = []
        """Loss and gradient norm of each step."""

    @property
    def state_bytes(self) -> int:
        """Of both parts."""
        return self.trainer.state_bytes + self.rollout.state_bytes

    def step(self) -> None:
        """One step of RL; a job that shares leaves the device after each part."""
        with self._resident(self.rollout):
            if self.trainer.seq:
                self._sync()
            drawn = self._generate()
        with self._resident(self.trainer), deterministic():
            self._train(drawn)

    def _sync(self) -> None:
        self.rollout.seq += 1
        params = SyncWeightsParams(source=f"{self._name}/train", delta=False)
        self.rollout.move(
            OperationKind.SYNC_WEIGHTS,
            source=params.source,
            sources=(self._node.listen,),
            source_seq=self.trainer.seq,
            trainer_step=self.trainer.seq,
            params=params,
        )

    def _generate(self) -> Arrays:
        backend = self.rollout.backend
        assert isinstance(backend, RolloutBackend)
        sampling = SamplingParams(
            max_tokens=RESPONSE_TOKENS, temperature=1.0, ignore_eos=True, seed=self.trainer.seq
        )
        params = GenerateParams(samples_per_prompt=SAMPLES, sampling=sampling)
        lengths = np.full(PROMPTS, PROMPT_TOKENS, np.int32)
        arrays = {"tokens": self._prompts.reshape(-1), "lengths": lengths}
        backend.submit(backend_call(OperationKind.GENERATE, params, arrays, self.rollout.seq), None)
        while True:
            for _, result in backend.step():
                return result.arrays

    def _train(self, drawn: Arrays) -> None:
        """One optimizer step. The reward counts the even tokens of a response."""
        rows = PROMPTS * SAMPLES
        responses = drawn["tokens"].reshape(rows, RESPONSE_TOKENS)
        rewards = (responses % 2 == 0).mean(1).reshape(PROMPTS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1)[:, None] + 1e-6)
        prompts = np.repeat(self._prompts, SAMPLES, 0)
        before = np.zeros_like(prompts, dtype=np.float32)
        inside = np.ones_like(responses, dtype=np.float32)
        arrays = {
            "tokens": np.concatenate([prompts, responses], 1).reshape(-1),
            "lengths": np.full(rows, PROMPT_TOKENS + RESPONSE_TOKENS, np.int32),
            "mask": np.concatenate([before, inside], 1).reshape(-1),
            "logprobs": np.concatenate(
                [before, drawn["logprobs"].reshape(rows, RESPONSE_TOKENS)], 1
            ).reshape(-1),
            "advantages": np.concatenate(
                [before, inside * advantages.reshape(rows, 1)], 1, dtype=np.float32
            ).reshape(-1),
        }
        found = self.trainer.run(
            OperationKind.FORWARD_BACKWARD,
            ForwardBackwardParams(loss=LOSS),
            arrays,
            micro_batches=max(1, rows // MICRO_BATCH_ROWS),
            denominator=float(inside.sum()),
        )
        self.figures.append(float(found.result["sums"]["loss"]))
        self.trainer.seq += 1
        stepped = self.trainer.run(OperationKind.OPTIM_STEP, ADAM, {})
        self.figures.append(float(stepped.result["metrics"]["grad_norm"]))
        self.trainer.move(OperationKind.PUBLISH)

    @contextmanager
    def _resident(self, part: Part) -> Iterator[None]:
        part.move(OperationKind.LOAD)
        yield
        if self._shares:
            part.move(OperationKind.OFFLOAD)

    def close(self) -> None:
        """Release all resources."""
        self.trainer.close()
        self.rollout.close()


@contextmanager
def deterministic() -> Iterator[None]:
    """No kernel whose result depends on timing. It raises RuntimeError where there is no other."""
    import torch

    # It would also write to memory that is not initialised, which takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def jobs_on(
    place: Place, seeds: tuple[int, ...], device_bytes: int | None, *, shares: bool
) -> Iterator[list[Job]]:
    """Jobs of these seeds, on a StateManager of their own. Their memory is free afterwards."""
    host_bytes = HOST_BYTES * len(seeds)
    with running_daemon(host_bytes, device=place.kind, device_bytes=device_bytes) as node:
        jobs = [Job(f"job{seed}", seed, node, place, shares=shares) for seed in seeds]
        yield jobs
        while jobs:
            jobs.pop().close()
    # Graphs of an engine refer to it.
    gc.collect()
    place.device.free_cached()


@contextmanager
def memory_of(driver: CudaDriver | None, nbytes: int) -> Iterator[None]:
    """Occupy the device's memory but for `nbytes`, if there is a device."""
    if driver is None:
        yield
        return
    driver.enter(0)
    grain = driver.granularity(0)
    handle = driver.create(0, (driver.memory_info()[0] - nbytes) // grain * grain)
    yield
    driver.release(handle)


def seconds_of(jobs: list[Job]) -> float:
    """Seconds of a step of one job, the first one left out."""
    started = 0.0
    for step in range(STEPS):
        if step == 1:
            started = time.perf_counter()
        for job in jobs:
            job.step()
    return (time.perf_counter() - started) / (STEPS - 1) / len(jobs)


def measure(place: Place) -> dict[str, float]:
    """The figures."""
    alone_s, alone, state_bytes = 0.0, [], 0
    for seed in SEEDS:
        with jobs_on(place, (seed,), None, shares=False) as jobs:
            alone_s += seconds_of(jobs) / len(SEEDS)
            note(f"job {seed} alone")
            alone.append(jobs[0].figures)
            state_bytes += jobs[0].state_bytes
    device_bytes = state_bytes * 9 // 10
    bound = device_bytes if place.driver is None else None
    with (
        # The StateManager's own context lies outside of what is left to the jobs.
        jobs_on(place, SEEDS, bound, shares=True) as jobs,
        memory_of(place.driver, device_bytes),
    ):
        shared_s = seconds_of(jobs)
        note("both in turns")
        shared = [job.figures for job in jobs]
    return {
        "step_s_alone": alone_s,
        "step_s_shared": shared_s,
        "gpu_seconds_ratio": shared_s / alone_s,
        "figures_difference_max": float(np.abs(np.array(shared) - np.array(alone)).max()),
        "states_of_device": state_bytes / device_bytes,
    }


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--cpu", action="store_true", help="the same without a GPU")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    try:
        with open_place(cpu=wanted.cpu) as place:
            figures = measure(place)
    except DeviceUnavailableError as error:
        sys.stdout.write(f"no GPU here, so nothing was measured: {error}\n")
        return
    rows = [[name, f"{value:.6g}"] for name, value in figures.items()]
    report(f"Two RL jobs in turns, {STEPS} steps each", ["figure", "value"], rows, figures)
    if figures["figures_difference_max"] > DIFFERENCE_MAX:
        sys.exit("losses or gradient norms of jobs in turns are not those of the jobs alone")


if __name__ == "__main__":
    main()
