"""What the ranks of the FSDP tests run: functions a spawned process can find by name."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import plexrl
from plexrl.deployment_spec import DeploymentSpec
from plexrl.model_spec import tiny_qwen2
from plexrl.statemanager.client import StateManagerClient
from plexrl.statemanager.ticket_key import read_ticket_key
from plexrl.statemanager.tickets import Claims, Role
from plexrl.wire.operations import (
    AdamParams,
    CheckpointParams,
    ForwardBackwardParams,
    LossSpec,
    OperationKind,
)
from plexrl.wire.tensors import Arrays
from plexrl.worker.arena_tensors import view
from plexrl.worker.backend import BackendCall
from plexrl.worker.checkpointing import save_checkpoint
from plexrl.worker.models import named_parameters
from plexrl.worker.training.backend import TrainingBackend
from plexrl.worker.training.fsdp import FsdpModel
from plexrl.worker.training.model import TrainingRank

MODEL = tiny_qwen2("0123456789abcdefghi", seed=1)
STEPS = 4
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
    made.build()
    return made


def call(kind: OperationKind, params: Any, arrays: Arrays, **rank_params: Any) -> BackendCall:
    """One operation as a rank sees it."""
    return BackendCall(
        operation="o", kind=kind, params=params, rank_params=rank_params, arrays=arrays, seq=1
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


def full_parameters(made: TrainingBackend) -> dict[str, torch.Tensor]:
    """All parameters whole, on every rank."""
    found: dict[str, torch.Tensor] = {}
    assert isinstance(made.model, FsdpModel)
    for name, parameter in named_parameters(made.model._model):
        assert isinstance(parameter.data, DTensor)
        found[name] = parameter.data.full_tensor()
    return found


def train(rank: int, ranks: int, store: str, folder: str, statemanager: str) -> None:
    """Train with every disturbance that a switch can bring, and save what came out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
    )
    calm, disturbed = (backend(rank, ranks, Path(folder)) for _ in range(2))
    norms = []
    for index in range(STEPS):
        for made in (calm, disturbed):
            arrays = batch(index)
            backward(made, part(arrays, rank, ranks), LOSS, len(arrays["lengths"]))
            if made is disturbed:
                through_the_store(made)
            # One row more ranks than rows: the last rank has none and must still take part.
            single = batch(100 + index, rows=1)
            backward(made, part(single, rank, ranks), LOSS, 1.0)
        norms.append((step(calm), step(disturbed)))
        through_the_store(disturbed)
    assert all(a == b for a, b in norms), norms
    one, other = full_parameters(calm), full_parameters(disturbed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    refuse_infinite_gradients(disturbed, rank, ranks)
    checkpoint = CheckpointParams(name=f"world{ranks}", overwrite=True)
    claims = Claims(
        role=Role.WORKER,
        job="j",
        deployment="j/actor",
        rank=rank,
        world_size=ranks,
        group="g",
    )
    client = StateManagerClient(
        statemanager,
        deployment="j/actor",
        rank=rank,
        world_size=ranks,
        ticket=read_ticket_key(Path(folder) / "nvme" / "ticket.key").mint(claims),
        timeout_s=60.0,
    )
    client.register(calm.arena, calm.slices(), group="g", token=1)
    saved = save_checkpoint(calm, client, checkpoint, operation="o", seq=STEPS, keep_seq=0, token=1)
    assert saved["path"] == f"{folder}/j/world{ranks}"
    if rank == 0:
        torch.save({"norms": [a for a, _ in norms], "parameters": one}, f"{folder}/world{ranks}.pt")
    leave()


def leave() -> None:
    """End this rank. Gloo's threads now and then abort an interpreter that unwinds round them, so
    it does not unwind: there is nothing left to be lost."""
    dist.barrier()
    os._exit(0)


def through_the_store(made: TrainingBackend) -> None:
    """What an offload and a load do: copy the live parts out, give all pages back, fill again."""
    parts = made.live_parts()
    kept = {
        piece: bytes(made.arena.buffer[piece.arena_offset : piece.arena_offset + piece.nbytes])
        for piece in made.slices()
        if piece.key.part in parts
    }
    made.before_offload()
    made.arena.detach()
    assert not any(made.arena.buffer)
    for piece, data in kept.items():
        made.arena.buffer[piece.arena_offset : piece.arena_offset + piece.nbytes] = data
    made.after_load(parts)


def refuse_infinite_gradients(made: TrainingBackend, rank: int, ranks: int) -> None:
    """An infinite gradient leaves the parameters alone, on every rank."""
    before = full_parameters(made)
    arrays = batch(5)
    weights = np.full(len(arrays["tokens"]), 3e38, dtype=np.float32)
    poisoned = {"tokens": arrays["tokens"], "lengths": arrays["lengths"], "weights": weights}
    backward(made, part(poisoned, rank, ranks), plexrl.losses.custom(), 1.0)
    try:
        norm = step(made)
    except plexrl.errors.NonFiniteGradientError:
        norm = math.inf
    assert norm == math.inf
    after = full_parameters(made)
    assert all(torch.equal(before[name], after[name]) for name in before)


def resume(rank: int, ranks: int, store: str, folder: str, name: str) -> None:
    """Load a checkpoint of another world size, and compare it with what was saved."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
    )
    made = backend(rank, ranks, Path(folder))
    made.run(call(OperationKind.LOAD_CHECKPOINT, CheckpointParams(name=name), {}, job="j"))
    wanted = torch.load(f"{folder}/{name}.pt")["parameters"]
    found = full_parameters(made)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    (count,) = (piece for piece in made.slices() if piece.key.name == "step")
    assert float(view(made.arena, count)) == STEPS
    leave()
