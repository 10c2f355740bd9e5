"""What the ranks of a conformance case run, and what they write down of it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import plexrl
from plexrl.errors import NonFiniteWeightsError, StateTierFullError
from plexrl.model.capabilities import backend_capabilities
from plexrl.router.dispatch.plan import DispatchPlan, plan_batch
from plexrl.router.dispatch.reductions import loss_denominator
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.client.host_arena import Borrowed
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.wire.messages import RankShare, SaveRequest
from plexrl.wire.operations import (
    AdamParams,
    CheckpointParams,
    ForwardBackwardParams,
    ForwardParams,
    LossSpec,
    OperationKind,
)
from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import TORCH_DTYPES
from plexrl.worker.state.save_checkpoint import save_checkpoint
from tests.wire.runs import make_run
from tests.worker.arena_memory import memory_of
from tests.worker.training.cases import WRITERS, Case

LOSS = plexrl.losses.grpo(kl_coef=0.1, entropy_coef=0.05)
VALUE_LOSS = plexrl.losses.value(clip=0.3, reduction="sequence_mean")
TOP = 3
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.05, weight_decay=0.1)
"""Clips: the gradients of these batches are larger."""
MICRO_BATCH_TOKENS = 24

Kept = dict[StateSlice, bytes]
"""A rank's state, slice by slice."""


@dataclass(slots=True)
class Step:
    """One optimizer step as a rank saw it."""

    before: Kept
    """Parameters and optimizer state."""
    outputs: list[Array] = field(default_factory=list)
    """Logprobs or values by batch, float32 `[T]` of this rank's tokens."""
    sums: list[dict[str, Any]] = field(default_factory=list)
    """By batch."""
    gradients: Kept = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    after: Kept = field(default_factory=dict)


def batches(step: int) -> tuple[Arrays, Arrays]:
    """What a step accumulates over: several micro-batches, and fewer rows than ranks; of those the
    second step's has nothing to teach."""
    return batch(10 * step), batch(10 * step + 1, rows=1, first_row=(5, 1)[step])


def batch(seed: int, rows: int = 9, *, first_row: int = 1) -> Arrays:
    """A packed batch for a policy loss with a reference. A row of one token predicts none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, rows).astype(np.int32)
    lengths[0] = first_row
    total = int(lengths.sum())
    return {
        "tokens": rng.integers(3, 23, total).astype(np.int32),
        "lengths": lengths,
        "mask": (rng.random(total) < 0.8).astype(np.float32),
        "logprobs": rng.normal(-3, 0.2, total).astype(np.float32),
        "advantages": rng.normal(0, 1, total).astype(np.float32),
        "ref_logprobs": rng.normal(-3, 0.2, total).astype(np.float32),
    }


def loss_of(case: Case) -> LossSpec:
    """What a case is trained by."""
    return VALUE_LOSS if case.is_critic else LOSS


def inputs_of(case: Case, arrays: Arrays) -> Arrays:
    """A batch with what that loss needs."""
    if not case.is_critic:
        return arrays
    rng = np.random.default_rng(len(arrays["tokens"]))
    returns, values = rng.normal(0, 1, (2, len(arrays["tokens"]))).astype(np.float32)
    return {**arrays, "returns": returns, "values": 0.2 * values}


def plan_of(case: Case, arrays: Arrays) -> DispatchPlan:
    """How the router lays a batch over the ranks of a case."""
    return plan_batch(
        case.layout,
        arrays["lengths"].tolist(),
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        packs=backend_capabilities("train", case.backend).packs,
    )


def launch(case: Case, folder: Path, statemanager: str) -> None:
    """Run a case on all of its ranks; they leave `<rank>.pt` in `folder`."""
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        conform,
        args=(case, str(folder), statemanager),
        nprocs=case.layout.world_size,
        start_method="forkserver",
    )


def conform(rank: int, case: Case, folder: str, statemanager: str) -> None:
    """All of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", case.layout.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.layout.world_size,
    )
    run = _Run(case, rank, statemanager)
    steps = [run.step(0), run.step(1)]
    forward = run.forward(batch(99))
    refusals = [run.refuse_infinite_gradients(), run.refuse_infinite_loss()]
    run.write_and_load()
    run.refuse_a_step_without_room()
    writer = WRITERS.get(case.model)
    loaded = {} if writer is None else run.load(writer.name, optimizer=True)
    fresh = run.load(case.name, optimizer=False)
    spoilt = run.spoil_weights()
    torch.save(
        {
            "steps": steps,
            "forward": forward,
            "refusals": refusals,
            "spoilt": spoilt,
            "loaded": loaded,
            "fresh": fresh,
            "config": run.backend.checkpoint_extras(None)["config.json"],
        },
        f"{folder}/{rank}.pt",
    )
    run.client.close()
    dist.barrier()
    # Gloo's threads now and then abort an interpreter that unwinds round them.
    os._exit(0)


class _FullTier:
    """A full host tier of a StateManager."""

    def borrow(self) -> Borrowed:
        raise StateTierFullError("full")

    def copied(self) -> None:
        """Nothing was lent."""

    abandoned = copied


class _Run:
    """A backend and its StateManager, as a worker process has them."""

    def __init__(self, case: Case, rank: int, statemanager: str) -> None:
        self.case, self.rank = case, rank
        root = Path(statemanager).parent
        self.backend: Backend = make_backend(case.spec, rank, case.layout.world_size, root)
        self.backend.lay_out()
        self.backend.materialise()
        claims = Claims(
            role=TicketRole.WORKER,
            job="j",
            deployment=f"j/{case.name}",
            rank=rank,
            world_size=case.layout.world_size,
            group=case.name,
        )
        self.client = StateManagerClient(
            statemanager,
            deployment=f"j/{case.name}",
            rank=rank,
            world_size=case.layout.world_size,
            ticket=read_ticket_key(root / "nvme" / "ticket.key").mint(claims),
            timeout_s=120.0,
        )
        self.seq = 0
        self._register()

    def step(self, index: int) -> Step:
        """Accumulate over calls, with a switch between and behind; then step."""
        found = Step(before=self._contents(StatePart.PARAMETER, StatePart.OPTIMIZER))
        for arrays in batches(index):
            result = self._forward_backward(arrays)
            found.outputs.append(result.arrays[self.case.output])
            found.sums.append(result.result["sums"])
            self._switch()
        found.gradients = self._contents(StatePart.GRADIENT)
        stepped = self._run(OperationKind.OPTIM_STEP, ADAM, {}).result
        found.metrics = stepped["metrics"]
        assert stepped["trainer_step"] == index + 1
        found.after = self._contents(StatePart.PARAMETER, StatePart.OPTIMIZER)
        assert not any(any(data) for data in self._contents(StatePart.GRADIENT).values())
        self._switch()
        return found

    def forward(self, arrays: Arrays) -> Arrays:
        """What is known of tokens, which a switch does not change by one bit."""
        first = self._forward(arrays)
        self._switch()
        again = self._forward(arrays)
        assert set(again) == set(first)
        assert all(np.array_equal(first[name], again[name]) for name in first)
        return first

    def refuse_infinite_gradients(self) -> Any:
        """The error of a step by gradients that are not finite; nothing has changed by it."""
        before = self._contents(StatePart.PARAMETER, StatePart.OPTIMIZER)
        arrays = batch(5)
        # The loss is finite, and the square of its gradient is not.
        weights = np.full(len(arrays["tokens"]), 1e36, dtype=np.float32)
        poisoned = {"tokens": arrays["tokens"], "lengths": arrays["lengths"], "weights": weights}
        self._forward_backward(poisoned, plexrl.losses.custom())
        refusal = self._run(OperationKind.OPTIM_STEP, ADAM, {}).result["error"]
        assert self._contents(StatePart.PARAMETER, StatePart.OPTIMIZER) == before
        assert not any(any(data) for data in self._contents(StatePart.GRADIENT).values())
        return refusal

    def refuse_infinite_loss(self) -> Any:
        """The error of a loss that is not finite; no gradients are left by it, on any rank."""
        arrays = batch(5)
        self._forward_backward(arrays)
        weights = np.zeros(len(arrays["tokens"]), dtype=np.float32)
        # In one row, which one rank has.
        row = int(arrays["lengths"].argmax())
        start = int(arrays["lengths"][:row].sum())
        weights[start : start + int(arrays["lengths"][row])] = 3e38
        poisoned = {"tokens": arrays["tokens"], "lengths": arrays["lengths"], "weights": weights}
        found = self._forward_backward(poisoned, plexrl.losses.custom())
        assert not any(any(data) for data in self._contents(StatePart.GRADIENT).values())
        return found.result["error"]

    def spoil_weights(self) -> tuple[Any, Any]:
        """The errors of a step to weights that are not finite, and of a check after it."""
        self._forward_backward(batch(5))
        found = []
        check_weights: Callable[[], None] = self.backend.check_weights
        for attempt in (
            lambda: self._run(OperationKind.OPTIM_STEP, AdamParams(learning_rate=1e39), {}),
            check_weights,
        ):
            with pytest.raises(NonFiniteWeightsError) as caught:
                attempt()
            found.append(caught.value.to_wire())
        return found[0], found[1]

    def write_and_load(self) -> None:
        """A checkpoint, and the same state out of it after a further step, which carried out again
        with switches in between, as after a restart, gives the same bits."""
        wanted = self._contents(StatePart.PARAMETER, StatePart.OPTIMIZER)
        params = CheckpointParams(name=self.case.name)
        kind = OperationKind.SAVE_CHECKPOINT
        command = make_run(kind, seq=self.seq, keep_seq=self.seq - 1, params=params)
        save_checkpoint(self.backend, self.client, command)
        once = self._stepped()
        assert once != wanted
        assert self.load(self.case.name, optimizer=True) == wanted
        self._switch()
        assert self._stepped(self._switch) == once

    def _stepped(self, between: Callable[[], None] = lambda: None) -> Kept:
        """What a rank has after a step by two batches."""
        for seed in (7, 8):
            self._forward_backward(batch(seed))
            between()
        self._run(OperationKind.OPTIM_STEP, ADAM, {})
        return self._contents(StatePart.PARAMETER, StatePart.OPTIMIZER)

    def refuse_a_step_without_room(self) -> None:
        """A step that does not fit host memory changes nothing, including clipped gradients; it is
        refused on every rank if one has no room."""
        host = self.backend.host_arena
        if host is None:
            return
        self._forward_backward(batch(9))
        self._switch()
        before = self._contents(*StatePart)
        lender = host.lender
        for full in (range(self.case.layout.world_size), range(1)):
            host.lender = _FullTier() if self.rank in full else lender
            try:
                self._run(OperationKind.OPTIM_STEP, ADAM, {})
            except StateTierFullError:
                assert self._contents(*StatePart) == before
            else:
                raise AssertionError("the step must not fit")
        host.lender = lender
        self._run(OperationKind.OPTIM_STEP, ADAM, {})
        assert self._contents(StatePart.PARAMETER) != before

    def load(self, name: str, *, optimizer: bool) -> Kept:
        """What a rank has once a checkpoint is loaded."""
        params = CheckpointParams(name=name, job="j", optimizer=optimizer)
        self.seq += 1
        result = self._run(OperationKind.LOAD_CHECKPOINT, params, {}).result
        assert (result["trainer_step"] > 0) == optimizer
        return self._contents(StatePart.PARAMETER, StatePart.OPTIMIZER)

    def _forward(self, arrays: Arrays) -> Arrays:
        params = ForwardParams()
        if not self.case.is_critic:
            params = ForwardParams(entropy=True, top_logprobs=TOP)
        return self._split(OperationKind.FORWARD, params, arrays).arrays

    def _forward_backward(self, arrays: Arrays, loss: LossSpec | None = None) -> BackendResult:
        if loss is None:
            loss, arrays = loss_of(self.case), inputs_of(self.case, arrays)
        params = ForwardBackwardParams(loss=loss)
        denominator = loss_denominator(loss, arrays)
        return self._split(OperationKind.FORWARD_BACKWARD, params, arrays, denominator=denominator)

    def _split(
        self, kind: OperationKind, params: Any, arrays: Arrays, **share: Any
    ) -> BackendResult:
        plan = plan_of(self.case, arrays)
        part = plan.inputs(arrays)[plan.part_of(self.rank)]
        return self._run(kind, params, part, micro_batches=plan.micro_batches, **share)

    def _run(self, kind: OperationKind, params: Any, arrays: Arrays, **share: Any) -> BackendResult:
        call = BackendCall(
            operation="o",
            kind=kind,
            params=params,
            share=RankShare(**share),
            job="j",
            arrays=arrays,
            seq=self.seq,
        )
        return self.backend.run(call)

    def _register(self) -> None:
        self.client.register(
            self.backend.arena,
            self.backend.slices(),
            group=self.case.name,
            token=1,
            host=self.backend.host_arena,
        )

    def _switch(self) -> None:
        """Out to the StateManager and in again: every live bit comes back."""
        before = self._contents(*self.backend.live_parts())
        self.seq += 1
        self.backend.before_offload()
        parts = self.backend.live_parts()
        order = SaveRequest(seq=self.seq, keep_seq=self.seq - 1, token=1)
        self.client.offload(order, parts=parts)
        if self.backend.host_arena is not None:
            self._register()
        self.backend.after_load(self.client.load(seq=self.seq, token=1).parts)
        assert self._contents(*parts) == before

    def _contents(self, *parts: StatePart) -> Kept:
        arena, host = self.backend.arena, self.backend.host_arena
        found: Kept = {}
        for piece in self.backend.slices():
            if piece.key.part not in parts:
                continue
            start = piece.arena_offset
            memory = memory_of(arena)
            if start >= host_start(arena.nbytes):
                assert host is not None
                start -= host_start(arena.nbytes)
                memory = host.buffer
            found[piece] = bytes(memory[start : start + piece.nbytes])
        return found


def assembled(ranks: list[Kept], part: StatePart) -> dict[str, torch.Tensor]:
    """Whole tensors out of every rank's slices: none missing, and equal where ranks overlap."""
    found: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for kept in ranks:
        for piece, data in kept.items():
            if piece.key.part != part:
                continue
            name, shape = piece.key.name, piece.global_shape
            whole = found.setdefault(name, torch.zeros(shape, dtype=TORCH_DTYPES[piece.dtype]))
            assert whole.shape == shape, name
            known = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            if not data:
                continue
            box = tuple(
                slice(at, at + extent) for at, extent in zip(piece.offset, piece.shape, strict=True)
            )
            value = torch.frombuffer(bytearray(data), dtype=whole.dtype).view(piece.shape)
            assert torch.equal(whole[box][known[box]], value[known[box]]), (
                f"{name}: replicas differ"
            )
            whole[box], known[box] = value, True
    missing = [name for name, known in seen.items() if not known.all()]
    assert not missing, f"no rank holds all of {missing}"
    return found
