"""What the ranks of the layer-by-layer test run."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from plexrl.model.memory.state_terms import LAYERWISE_PARAMETERS
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import ForwardBackwardParams, OperationKind
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.training.backend import TrainingBackend
from plexrl.worker.training.fsdp.model import FsdpModel
from plexrl.worker.training.model import TrainingRank
from tests.worker.training.cases import Case
from tests.worker.training.ranks import ADAM, LOSS, batch

LAYERWISE = ((LAYERWISE_PARAMETERS, False), (1, False), (1, True))
"""Parameters from which a model is gathered layer by layer, and whether it reduces once."""
STEPS = 2
MICRO_BATCHES = 3


class _Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's is untyped
    """Counts reductions of gradients to their shards, and their bytes."""

    count = nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if "reduce_scatter" in str(func):
            self.count += 1
            self.nbytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def train_both_ways(rank: int, case: Case, folder: str) -> None:
    """The same steps with a model gathered at once and ones gathered layer by layer."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", case.layout.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.layout.world_size,
    )
    # With activations computed again a layer is gathered a third time, for that.
    spec = replace(case.spec, activation_checkpointing=True)
    ways = []
    for least, reduce_once in LAYERWISE:
        place = TrainingRank(spec=replace(spec, reduce_once=reduce_once), rank=rank)
        model = FsdpModel(place, layerwise_parameters=least)
        ways.append(TrainingBackend(place, model, Path(folder)))
    for made in ways:
        made.lay_out()
        made.materialise()
    for index in range(STEPS):
        for made in ways:
            # The order of sums over micro-batches and ranks differs, hence one micro-batch.
            seed = 2 * index + case.layout.coordinates(rank).dp
            _run(made, OperationKind.FORWARD_BACKWARD, seed, micro_batches=1)
            made.before_offload()
            _run(made, OperationKind.OPTIM_STEP, 0)
    kept = [_values(made, StatePart.PARAMETER) for made in ways]
    # Only the first has no parts of FSDP below the whole.
    assert [len(_gathered_apart(made)) for made in ways] == [1, 3, 3]
    for other in kept[1:]:
        assert kept[0].keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in kept[0].items())
    _check_reductions(ways, case.layout.coordinates(rank).dp)
    dist.barrier()
    # Gloo's threads now and then abort an interpreter that unwinds round them.
    os._exit(0)


def _check_reductions(ways: list[TrainingBackend], seed: int) -> None:
    """Gradients of a model gathered at once, or that says so, are reduced once, to the sums of the
    others."""
    counts, sizes = [], []
    for made in ways:
        with _Reductions() as seen:  # type: ignore[no-untyped-call]
            _run(made, OperationKind.FORWARD_BACKWARD, seed, micro_batches=MICRO_BATCHES)
        counts.append(seen.count)
        sizes.append(seen.nbytes)
    assert counts == [1, MICRO_BATCHES * 3, 3], "micro-batches times parts of FSDP"
    assert sizes[1] == MICRO_BATCHES * sizes[2], "float32 each time"
    once, *others = (_values(made, StatePart.GRADIENT) for made in ways)
    for other in others:
        for name, value in once.items():
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


def _run(made: TrainingBackend, kind: OperationKind, seed: int, micro_batches: int = 1) -> None:
    backward = kind == OperationKind.FORWARD_BACKWARD
    made.run(
        BackendCall(
            operation="o",
            kind=kind,
            params=ForwardBackwardParams(loss=LOSS) if backward else ADAM,
            share=RankShare(micro_batches=micro_batches, denominator=9.0),
            arrays=batch(seed) if backward else {},
            seq=1,
        )
    )


def _values(made: TrainingBackend, part: StatePart) -> dict[str, torch.Tensor]:
    return {
        piece.key.name: view(made.arena, piece).clone()
        for piece in made.slices()
        if piece.key.part == part
    }


def _gathered_apart(made: TrainingBackend) -> list[FSDPModule]:
    assert isinstance(made.model, FsdpModel)
    return [each for each in made.model._model.modules() if isinstance(each, FSDPModule)]
