"""Batches and single operations of the host optimizer's tests."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import plexrl
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import (
    AdamParams,
    ForwardBackwardParams,
    LossSpec,
    OperationKind,
)
from plexrl.wire.tensors import Arrays
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.training.backend import TrainingBackend
from plexrl.worker.training.fsdp.model import FsdpModel
from plexrl.worker.training.model import TrainingRank

MODEL = tiny_qwen2("0123456789abcdefghi", seed=1)
LOSS = plexrl.losses.grpo()


def batch(seed: int, rows: int = 10) -> Arrays:
    """A packed batch for a policy loss."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, rows).astype(np.int32)
    total = int(lengths.sum())
    return {
        "tokens": rng.integers(3, 20, total).astype(np.int32),
        "lengths": lengths,
        "mask": np.ones(total, dtype=np.float32),
        "logprobs": rng.normal(-3, 0.2, total).astype(np.float32),
        "advantages": rng.normal(0, 1, total).astype(np.float32),
    }


def part(arrays: Arrays, rank: int, ranks: int) -> Arrays:
    """Every `ranks`-th row, for one rank."""
    ends = np.cumsum(arrays["lengths"])
    rows = list(range(rank, len(ends), ranks))
    places = [np.arange(ends[r] - arrays["lengths"][r], ends[r]) for r in rows]
    index = np.concatenate([*places, np.empty(0, dtype=np.int64)]).astype(np.int64)
    found = {name: array[index] for name, array in arrays.items() if name != "lengths"}
    return {**found, "lengths": arrays["lengths"][rows]}


def backend(rank: int, ranks: int, folder: Path, optimizer: str = "device") -> TrainingBackend:
    """A built backend."""
    spec = DeploymentSpec(
        model=MODEL, kind="train", backend="fsdp", workers=ranks, optimizer=optimizer
    )
    place = TrainingRank(spec=spec, rank=rank)
    made = TrainingBackend(place, FsdpModel(place), folder)
    made.lay_out()
    made.materialise()
    return made


def call(
    kind: OperationKind, params: Any, arrays: Arrays, *, job: str = "", **share: Any
) -> BackendCall:
    """One operation as a rank sees it."""
    return BackendCall(
        operation="o",
        kind=kind,
        params=params,
        share=RankShare(**share),
        arrays=arrays,
        job=job,
        seq=1,
    )


def backward(made: TrainingBackend, arrays: Arrays, loss: LossSpec, denominator: float) -> Any:
    """Run a forward_backward in two micro-batches."""
    params = ForwardBackwardParams(loss=loss)
    return made.run(
        call(
            OperationKind.FORWARD_BACKWARD,
            params,
            arrays,
            micro_batches=2,
            denominator=denominator,
        )
    )


def step(made: TrainingBackend) -> float:
    """Run an optim_step; returns the gradient norm."""
    params = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
    result = made.run(call(OperationKind.OPTIM_STEP, params, {})).result
    if "error" in result:
        raise plexrl.errors.from_wire(result["error"])
    return float(result["metrics"]["grad_norm"])


def leave() -> None:
    """End this rank. Gloo's threads now and then abort an interpreter that unwinds round them, so
    it does not unwind: there is nothing left to be lost."""
    dist.barrier()
    os._exit(0)
