"""Steps of an optimizer on the ranks of a case."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.operations import AdamParams, OperationKind
from plexrl.worker.state.arena_tensors import view
from tests.worker.training.cases import Case
from tests.worker.training.deferred_ranks import DeferredRank
from tests.worker.training.ranks import Kept, batch, inputs_of, loss_of

STEPS = 3
Record = list[dict[str, Kept]]
"""By step: `before`, `gradients` and `after`."""


def launch(case: Case, params: AdamParams, folder: Path) -> list[Record]:
    """What each rank has before and after each step."""
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        run,
        args=(case, params, str(folder)),
        nprocs=case.layout.world_size,
        start_method="forkserver",
    )
    ranks = range(case.layout.world_size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in ranks]


def run(rank: int, case: Case, params: AdamParams, folder: str) -> None:
    """All of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", case.layout.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.layout.world_size,
    )
    own = DeferredRank(case, rank, Path(folder))
    record: Record = []
    for step in range(STEPS):
        own.gradients(inputs_of(case, batch(step)), loss_of(case))
        found = {
            "before": kept(own, StatePart.PARAMETER),
            "gradients": kept(own, StatePart.GRADIENT),
        }
        own.run(OperationKind.OPTIM_STEP, params, {})
        record.append({**found, "after": kept(own, StatePart.PARAMETER)})
    torch.save(record, f"{folder}/{rank}.pt")
    dist.barrier()
    # Gloo's threads now and then abort an interpreter that unwinds round them.
    os._exit(0)


def kept(own: DeferredRank, part: StatePart) -> Kept:
    """A rank's slices of this part."""
    return {
        piece: view(own.backend.arena, piece).contiguous().numpy().tobytes()
        for piece in own.backend.slices()
        if piece.key.part == part
    }
