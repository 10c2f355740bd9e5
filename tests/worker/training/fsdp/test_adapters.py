"""Adapters on a frozen model, sharded by FSDP, against plain torch that merges them by hand."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.func import functional_call

import plexrl
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.lora import LoraSpec, adapter_names, adapter_parameter_count
from plexrl.model.spec import tiny_qwen2
from plexrl.router.dispatch.plan import plan_batch
from plexrl.router.dispatch.reductions import loss_denominator
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import AdamParams, ForwardBackwardParams, OperationKind
from plexrl.worker.batches.losses import compute_loss
from plexrl.worker.batches.packing import micro_batches
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.models import build_model
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.state_mover import StateMover
from plexrl.worker.training.backend import TrainingBackend
from tests.statemanager.conftest import Daemon, daemon_in
from tests.wire.runs import make_run
from tests.worker.training.ranks import batch

MODEL = tiny_qwen2("0123456789abcdefghijk", seed=1, hidden=32)
LORA = LoraSpec(rank=3, alpha=12.0, targets=("q_proj", "o_proj", "down_proj"), seed=2)
"""Rank 3, so that two ranks hold 2 rows and 1."""
LOSS = plexrl.losses.grpo(kl_coef=0.1)
STEPS = 3
CASES = {
    "alone": DeploymentSpec(model=MODEL, kind="train", backend="fsdp", workers=1, lora=LORA),
    "dp2": DeploymentSpec(model=MODEL, kind="train", backend="fsdp", workers=2, lora=LORA),
    "dp2-recomputed": DeploymentSpec(
        model=MODEL,
        kind="train",
        backend="fsdp",
        workers=2,
        lora=LORA,
        optimizer="host",
        activation_checkpointing=True,
    ),
}


def train(rank: int, name: str, folder: str, listen: str, tickets: list[bytes]) -> None:
    """One rank: steps with a switch between backward and step, and its shards at the end."""
    torch.set_num_threads(1)
    spec = CASES[name]
    store = dist.FileStore(f"{folder}/store", spec.workers)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.workers)
    backend = make_backend(spec, rank, spec.workers, Path(folder))
    assert isinstance(backend, TrainingBackend)
    client = StateManagerClient(
        listen, deployment="j/actor", rank=rank, world_size=spec.workers, ticket=tickets[rank]
    )
    mover = StateMover(backend, client, "g")

    def move(kind: OperationKind, seq: int) -> dict[str, Any]:
        return mover.move(make_run(kind, seq=seq))

    move(OperationKind.LOAD, 0)
    filled = []
    for step in range(STEPS):
        arrays = batch(step)
        plan = plan_batch(
            spec.layout, arrays["lengths"].tolist(), micro_batch_tokens=24, packs=False
        )
        backend.run(
            BackendCall(
                operation="o",
                kind=OperationKind.FORWARD_BACKWARD,
                params=ForwardBackwardParams(loss=LOSS),
                share=RankShare(
                    micro_batches=plan.micro_batches,
                    denominator=loss_denominator(LOSS, arrays),
                ),
                arrays=plan.inputs(arrays)[plan.part_of(rank)],
                seq=2 * step + 1,
            )
        )
        seq = 2 * step + 1
        move(OperationKind.OFFLOAD, seq)
        measured = move(OperationKind.LOAD, seq)
        filled.append(measured["base_bytes_filled"])
        params = AdamParams(learning_rate=1e-2, grad_clip_norm=0.1)
        call = BackendCall(
            operation="o",
            kind=OperationKind.OPTIM_STEP,
            params=params,
            arrays={},
            seq=seq + 1,
        )
        backend.run(call)
    kept = {
        (piece.key.name, piece.offset): view(backend.arena, piece).clone()
        for piece in backend.slices()
        if piece.key.part == StatePart.PARAMETER
    }
    torch.save({"kept": kept, "filled": filled}, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("adapters")
    made = daemon_in(folder, 64 << 20)
    yield made
    made.clean_up()


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    """The same training in one process: adapters merged into the weights, differentiated."""
    model: Any = build_model(MODEL)
    frozen = {name: parameter.detach() for name, parameter in model.named_parameters()}
    adapters = {
        name: value.clone().requires_grad_(True) for name, value in first_adapters().items()
    }
    optimizer = torch.optim.AdamW(
        adapters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for step in range(STEPS):
        arrays = batch(step)
        [rows] = micro_batches(arrays, 1)
        merged = dict(frozen)
        for name in frozen:
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in LORA.targets:
                down, up = (adapters[each] for each in adapter_names(module))
                merged[name] = frozen[name] + 12.0 / 3 * up @ down
        inputs = {"input_ids": rows.tokens_BL, "attention_mask": rows.valid_BL.long()}
        logits = functional_call(model, merged, (), inputs).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, rows.tokens_BL[:, 1:, None])
        padded = torch.nn.functional.pad(logprobs[..., 0] * rows.valid_BL[:, 1:], (1, 0))
        loss = compute_loss(LOSS, padded, rows.per_token_BL, loss_denominator(LOSS, arrays)).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(adapters.values(), 0.1)
        optimizer.step()
    return {name: value.detach() for name, value in adapters.items()}


def first_adapters() -> dict[str, torch.Tensor]:
    """A uniform within 1 / sqrt(inputs) from the seed, in the order of the model; B zero."""
    generator = torch.Generator().manual_seed(LORA.seed)
    found: dict[str, torch.Tensor] = {}
    model: Any = build_model(MODEL)
    for layer in range(MODEL.config["num_hidden_layers"]):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            module = f"model.layers.{layer}.{part}"
            outputs, inputs = model.get_submodule(module).weight.shape
            down, up = adapter_names(module)
            bound = inputs**-0.5
            values = torch.empty(LORA.rank, inputs)
            found[down] = values.uniform_(-bound, bound, generator=generator)
            found[up] = torch.zeros(outputs, LORA.rank)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "dp2" else []) for n in CASES]
)
def test_adapters_learn_what_plain_torch_has_them_learn(
    name: str, daemon: Daemon, tmp_path: Path, reference: dict[str, torch.Tensor]
) -> None:
    ranks = CASES[name].workers
    tickets = [daemon.worker_ticket("j/actor", rank, ranks) for rank in range(ranks)]
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        train,
        args=(name, str(tmp_path), daemon.config.listen, tickets),
        nprocs=ranks,
        start_method="forkserver",
    )
    found = {key: torch.zeros_like(value) for key, value in reference.items()}
    for rank in range(ranks):
        record = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert record["filled"] == [0] * STEPS, "the base stays while the process lives"
        for (key, offset), value in record["kept"].items():
            found[key][offset[0] : offset[0] + value.shape[0]] = value
    assert sum(value.numel() for value in found.values()) == adapter_parameter_count(MODEL, LORA)
    for key, wanted in reference.items():
        assert torch.allclose(found[key], wanted, atol=2e-4), key
    begun = first_adapters()
    assert all(not np.allclose(found[key], begun[key], atol=1e-3) for key in found)
