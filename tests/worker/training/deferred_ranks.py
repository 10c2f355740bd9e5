"""What the ranks of a case compute from one batch, whole and in parts."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from plexrl.router.dispatch.reductions import loss_denominator
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import (
    AdamParams,
    ForwardBackwardParams,
    LossSpec,
    OperationKind,
)
from plexrl.wire.tensors import Arrays
from plexrl.worker.interface.backend import BackendCall, BackendResult
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.training.flat_state import STEP
from tests.worker.arena_memory import memory_of
from tests.worker.training.cases import Case
from tests.worker.training.ranks import batch, inputs_of, plan_of

CLIP_NORM = 0.05
SPLITS = 20
ROWS = 9


def rows_of(arrays: Arrays, rows: list[int]) -> Arrays:
    """A batch of these rows."""
    starts = np.cumsum(arrays["lengths"]) - arrays["lengths"]
    tokens = np.concatenate([np.arange(starts[r], starts[r] + arrays["lengths"][r]) for r in rows])
    return {
        name: values[rows] if name == "lengths" else values[tokens]
        for name, values in arrays.items()
    }


def random_parts(seed: int) -> list[list[int]]:
    """The rows of a batch in a random order, cut into parts at random places."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(ROWS).tolist()
    cuts = sorted(rng.choice(np.arange(1, ROWS), rng.integers(0, ROWS), replace=False).tolist())
    bounds = zip([0, *cuts], [*cuts, ROWS], strict=True)
    return [order[first:last] for first, last in bounds]


def counted_rows(arrays: Arrays) -> int:
    """Rows of which a predicted token has a mask above 0."""
    ends = np.cumsum(arrays["lengths"])
    starts = ends - arrays["lengths"]
    return sum(
        bool(arrays["mask"][first + 1 : last].any())
        for first, last in zip(starts, ends, strict=True)
    )


def counted_tokens(arrays: Arrays) -> float:
    """The mask's sum over predicted tokens."""
    firsts = np.cumsum(arrays["lengths"]) - arrays["lengths"]
    return float(np.delete(arrays["mask"], firsts).sum())


class DeferredRank:
    """One rank of a case, without a StateManager."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case, self.rank = case, rank
        self.backend = make_backend(case.spec, rank, case.layout.world_size, folder)
        self.backend.lay_out()
        self.backend.materialise()

    def gradients(self, part: Arrays, loss: LossSpec) -> None:
        plan = plan_of(self.case, part)
        self.run(
            OperationKind.FORWARD_BACKWARD,
            ForwardBackwardParams(loss=loss),
            plan.inputs(part)[plan.part_of(self.rank)],
            micro_batches=plan.micro_batches,
            denominator=loss_denominator(loss, part),
        )

    def run(self, kind: OperationKind, params: Any, arrays: Arrays, **share: Any) -> BackendResult:
        call = BackendCall(
            operation="o", kind=kind, params=params, share=RankShare(**share), arrays=arrays, seq=0
        )
        return self.backend.run(call)

    def kept(self, part: StatePart) -> torch.Tensor:
        """The state of this part as one vector, without the number of steps."""
        found = [
            view(self.backend.arena, each).clone().flatten().to(torch.float64)
            for each in self.backend.slices()
            if each.key.part == part and each.key != STEP
        ]
        return torch.cat(found)

    def restore(self, state: bytes) -> None:
        """Back to an earlier state, without gradients."""
        self.backend.before_offload()
        memory_of(self.backend.arena)[:] = state
        self.backend.after_load(frozenset({StatePart.PARAMETER, StatePart.OPTIMIZER}))

    def step(self, divide_by: float) -> tuple[torch.Tensor, float]:
        """Moments after a step, and its gradient's norm."""
        params = AdamParams(learning_rate=1e-3, divide_by=divide_by, grad_clip_norm=CLIP_NORM)
        result = self.run(OperationKind.OPTIM_STEP, params, {}).result
        return self.kept(StatePart.OPTIMIZER), result["metrics"]["grad_norm"]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of what is wanted, over all ranks."""
    squares = torch.stack([(found - wanted).square().sum(), wanted.square().sum()])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())


def compare(rank: int, case: Case, loss: LossSpec, summed: LossSpec, folder: str) -> None:
    """Writes the relative differences of gradient, moments and norm for random splits."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", case.layout.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.layout.world_size,
    )
    own = DeferredRank(case, rank, Path(folder))
    by_row = summed.reduction == "sequence_sum"
    differences = []
    for seed in range(SPLITS):
        arrays = inputs_of(case, batch(seed, rows=ROWS, first_row=1 + seed % 5))
        before = bytes(memory_of(own.backend.arena))
        own.gradients(arrays, loss)
        gradient = own.kept(StatePart.GRADIENT)
        moments, norm = own.step(1.0)
        own.restore(before)
        count = 0.0
        for rows in random_parts(seed):
            part = rows_of(arrays, rows)
            own.gradients(part, summed)
            count += counted_rows(part) if by_row else counted_tokens(part)
        in_parts = own.kept(StatePart.GRADIENT) / count
        stepped, norm_in_parts = own.step(count)
        assert norm > CLIP_NORM, "nothing would be clipped"
        differences.append(
            (
                relative(in_parts, gradient),
                relative(stepped, moments),
                abs(norm_in_parts / norm - 1),
            )
        )
    torch.save(differences, f"{folder}/{rank}.pt")
    dist.barrier()
    # Gloo's threads now and then abort an interpreter that unwinds round them.
    os._exit(0)


def launch(case: Case, loss: LossSpec, summed: LossSpec, folder: Path) -> list[tuple[float, ...]]:
    """For each random split: the relative differences of gradient, moments and norm."""
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        compare,
        args=(case, loss, summed, str(folder)),
        nprocs=case.layout.world_size,
        start_method="forkserver",
    )
    differences = torch.load(folder / "0.pt", weights_only=False)
    assert isinstance(differences, list)
    return differences
