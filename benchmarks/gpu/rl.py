"""Two RL jobs that take turns on one GPU, against the same jobs alone.

    python -m benchmarks.gpu.rl [--quick] [--cpu] [--json]

Each job has a trainer (fsdp, GRPO) and a rollout (the built-in engine) of a random model of about
half a billion parameters. Shared, each of the four has the device in turn, and device memory is
capped so that the two trainers do not fit at once; weights go from trainer to rollout by publish
and pull. Alone, a job keeps both on the device. Losses and gradient norms must agree. Reports also
the engine's tokens per second beside `transformers.generate` with the same prompts. `--cpu` runs
the same code without a GPU, which is quick together with `--quick`.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.gpu.switch import GIB, start_daemon
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.errors import DeviceUnavailableError
from plexrl.losses import grpo
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.device.cuda.bindings import BoundDriver
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, Role
from plexrl.wire.operations import (
    AdamParams,
    ForwardBackwardParams,
    GenerateParams,
    OperationKind,
    SamplingParams,
    SyncWeightsParams,
)
from plexrl.wire.tensors import Arrays
from plexrl.worker.process.backend import Backend, BackendCall, RolloutBackend
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.process.command import RunCommand
from plexrl.worker.state.device import WorkerDevice, open_device
from plexrl.worker.state.state_mover import StateMover

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyz"
STEPS = sized(4, quick=2)
PROMPTS, SAMPLES = sized(16, quick=2), sized(8, quick=2)
PROMPT_TOKENS = 16
RESPONSE_TOKENS = sized(112, quick=6)
HOST_BYTES = sized(28 * GIB, quick=GIB // 4)
LOSS = grpo()
ADAM = AdamParams(learning_rate=1e-5, grad_clip_norm=1.0)
MODEL = sized(
    {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 13,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 512,
    },
    quick={},
)


def model(seed: int) -> ModelSpec:
    """A random model."""
    small = tiny_qwen2(VOCABULARY, seed=seed)
    return dataclasses.replace(small, config_json=json.dumps({**small.config, **MODEL}))


class Part:
    """A trainer or a rollout: a backend, and the moves of its state."""

    def __init__(self, spec: DeploymentSpec, job: str, node: StateManagerConfig) -> None:
        self.backend: Backend = make_backend(spec, 0, 1, Path("/nowhere"), DEVICE.get())
        claims = Claims(role=Role.WORKER, job=job, deployment=f"{job}/{spec.kind}")
        key = read_ticket_key(node.ticket_key_path)
        self.client = StateManagerClient(
            node.listen,
            deployment=claims.deployment,
            rank=0,
            world_size=1,
            ticket=key.mint(claims),
        )
        self.mover = StateMover(self.backend, self.client, "group", DEVICE.get())
        self.seq = 0

    def move(self, kind: OperationKind, **fields: Any) -> dict[str, Any]:
        """Carry out a move of the present version."""
        command = RunCommand(
            operation="o", kind=kind, token=1, seq=self.seq, keep_seq=self.seq, **fields
        )
        return self.mover.move(command)

    def run(self, kind: OperationKind, params: object, arrays: Arrays, **rank: Any) -> Any:
        """The result of an operation that writes to the state."""
        found = self.backend.run(_call(kind, params, arrays, self.seq, **rank))
        self.mover.written()
        return found

    def close(self) -> None:
        """Release all resources."""
        self.client.close()
        self.backend.arena.close()


class _Device:
    """The device of this process."""

    def __init__(self) -> None:
        self._device: WorkerDevice | None = None

    def open(self, uuid: str) -> None:
        self._device = open_device(uuid)

    def get(self) -> WorkerDevice:
        assert self._device is not None, "main opens it first"
        return self._device


DEVICE = _Device()


class Job:
    """A GRPO loop: generate, reward, train, sync."""

    def __init__(self, name: str, seed: int, node: StateManagerConfig, *, shares: bool) -> None:
        self._node = node
        self._name = name
        self._shares = shares
        self._prompts = np.random.default_rng(seed).integers(
            3, 3 + len(VOCABULARY), (PROMPTS, PROMPT_TOKENS), dtype=np.int32
        )
        common: dict[str, Any] = {
            "model": model(seed),
            "workers": 1,
            "max_sequence_tokens": PROMPT_TOKENS + RESPONSE_TOKENS,
        }
        self.trainer = Part(DeploymentSpec(kind="train", backend="fsdp", **common), name, node)
        self.rollout = Part(DeploymentSpec(kind="rollout", backend="torch", **common), name, node)
        self.figures: list[float] = []
        """Loss and gradient norm of each step."""
        self.generate_s: list[float] = []
        self.tokens = 0

    def step(self) -> None:
        """One step of RL; a job that shares leaves the device after each part."""
        with self._resident(self.rollout):
            if self.trainer.seq:
                self._sync()
            drawn = self._generate()
        with self._resident(self.trainer):
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
            params_json=msgspec.json.encode(params).decode(),
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
        started = time.perf_counter()
        backend.submit(_call(OperationKind.GENERATE, params, arrays, self.rollout.seq), None)
        while True:
            for _, result in backend.step():
                self.generate_s.append(time.perf_counter() - started)
                self.tokens += len(result.arrays["tokens"])
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
            micro_batches=max(1, rows // 16),
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


def _call(
    kind: OperationKind, params: object, arrays: Arrays, seq: int, **rank: Any
) -> BackendCall:
    return BackendCall(
        operation="o", kind=kind, params=params, rank_params=rank, arrays=arrays, seq=seq
    )


@contextmanager
def jobs_on(
    seeds: list[int], kind: DeviceKind, device_bytes: int | None, *, shares: bool
) -> Iterator[list[Job]]:
    """Jobs of these seeds, on a StateManager of their own."""
    directory = Path(tempfile.mkdtemp(prefix="plexrl-gpu-"))
    daemon, node = start_daemon(directory, HOST_BYTES, device=kind, device_bytes=device_bytes)
    try:
        jobs = [Job(f"job{seed}", seed, node, shares=shares) for seed in seeds]
        yield jobs
        for job in jobs:
            job.close()
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(directory)
        shutil.rmtree(node.host_dir, ignore_errors=True)


def seconds_of(jobs: list[Job]) -> float:
    """Seconds of a step of one job, the first one left out."""
    started = 0.0
    for step in range(STEPS):
        if step == 1:
            started = time.perf_counter()
        for job in jobs:
            job.step()
    return (time.perf_counter() - started) / (STEPS - 1) / len(jobs)


def transformers_rate() -> float:
    """Tokens per second of `transformers.generate` with the prompts of a job."""
    import torch

    from plexrl.worker.models import build_model

    device = DEVICE.get().torch_device
    made: Any = build_model(model(1)).to(device)
    rows = torch.randint(3, 3 + len(VOCABULARY), (PROMPTS * SAMPLES, PROMPT_TOKENS)).to(device)
    options = {"max_new_tokens": RESPONSE_TOKENS, "min_new_tokens": RESPONSE_TOKENS}
    with torch.inference_mode():
        for _ in range(2):
            started = time.perf_counter()
            found = made.generate(
                rows, attention_mask=torch.ones_like(rows), do_sample=True, **options
            ).cpu()
    taken_s = time.perf_counter() - started
    assert found.shape[1] == PROMPT_TOKENS + RESPONSE_TOKENS
    return PROMPTS * SAMPLES * RESPONSE_TOKENS / taken_s


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--cpu", action="store_true", help="the same without a GPU")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    uuid, kind = "", DeviceKind.CPU
    if not wanted.cpu:
        try:
            uuid, kind = BoundDriver().uuids()[0], DeviceKind.CUDA
        except (DeviceUnavailableError, IndexError) as error:
            sys.stdout.write(f"no GPU here, so nothing was measured: {error}\n")
            return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    DEVICE.open(uuid)
    import torch
    import torch.distributed as dist

    torch.use_deterministic_algorithms(True, warn_only=True)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group(DEVICE.get().collectives, store=store, rank=0, world_size=1)
        alone_s, alone, rate = 0.0, [], 0.0
        state_bytes: list[int] = []
        for seed in (1, 2):
            with jobs_on([seed], kind, None, shares=False) as jobs:
                alone_s += seconds_of(jobs) / 2
                alone += [job.figures for job in jobs]
                state_bytes += [job.trainer.backend.arena.nbytes for job in jobs]
                rate = PROMPTS * SAMPLES * RESPONSE_TOKENS / min(jobs[0].generate_s)
        cap = max(state_bytes) * 3 // 2
        with jobs_on([1, 2], kind, cap, shares=True) as jobs:
            shared_s = seconds_of(jobs)
            shared = [job.figures for job in jobs]
        beside = transformers_rate()
        dist.destroy_process_group()
    figures = {
        "step_s_alone": alone_s,
        "step_s_shared": shared_s,
        "gpu_seconds_ratio": shared_s / alone_s,
        "figures_difference_max": float(np.abs(np.array(shared) - np.array(alone)).max()),
        "states_of_device": sum(state_bytes) / cap,
        "engine_tokens_s": rate,
        "transformers_tokens_s": beside,
        "engine_ratio": rate / beside,
    }
    rows = [[name, f"{value:.6g}"] for name, value in figures.items()]
    report(f"Two RL jobs in turns, {STEPS} steps each", ["figure", "value"], rows, figures)


if __name__ == "__main__":
    main()
