"""Recorded loaders, against the same loaders run over real tensors."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.plan.balance import Source
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.plan.plan import make_plan
from plexrl.statemanager.transfer.copy.strided_copy import copy_runs
from plexrl.worker.loader_recorder import Load, Placed, record_loader

HIDDEN, HEADS, EXPERTS, INNER = 16, 4, 3, 12
SHAPES = {
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN // 2, HIDDEN),
    "v": (HIDDEN // 2, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "norm": (HIDDEN,),
    **{f"e{index}.{part}": (INNER, HIDDEN) for index in range(EXPERTS) for part in ("gate", "up")},
    **{f"e{index}.down": (HIDDEN, INNER) for index in range(EXPERTS)},
}
CHECKPOINT = {name: (shape, "F32") for name, shape in SHAPES.items()}


class Layer(nn.Module):
    """A tensor-parallel rank's fused layer, in BF16 but for its norm, with loaders of its own."""

    def __init__(self, device: str, rank: int, ways: int) -> None:
        super().__init__()
        self.rank, self.ways = rank, ways

        def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), False)

        self.qkv = weight(2 * HIDDEN // ways, HIDDEN)
        self.o = weight(HIDDEN, HIDDEN // ways)
        self.norm = weight(HIDDEN, dtype=torch.float32)
        self.up = weight(EXPERTS, 2 * INNER // ways, HIDDEN)
        self.down = weight(EXPERTS, INNER // ways, HIDDEN)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = dict(tensors)

        def rows(name: str) -> torch.Tensor:
            return named[name].chunk(self.ways)[self.rank]

        self.qkv.copy_(torch.cat([rows("q"), rows("k"), rows("v")]))
        size = HIDDEN // self.ways
        self.o.data.copy_(named["o"].narrow(1, self.rank * size, size))
        self.norm.copy_(named["norm"])
        half = INNER // self.ways
        for index in range(EXPERTS):
            self.up.data[index, :half].copy_(rows(f"e{index}.gate").to(torch.bfloat16))
            self.up.data[index].narrow(0, half, half).copy_(rows(f"e{index}.up"))
            turned = named[f"e{index}.down"].t().contiguous()
            self.down.data[index].copy_(turned[self.rank * half : (self.rank + 1) * half])


def place(layer: Layer) -> tuple[list[Placed], int]:
    placed, end = [], 64
    for parameter in layer.parameters():
        placed.append(Placed(tensor=parameter, arena_offset=end))
        end += -(-parameter.numel() * parameter.element_size() // 64) * 64
    return placed, end


@pytest.mark.parametrize(("rank", "ways"), [(0, 1), (0, 2), (1, 2)])
def test_a_plan_from_a_recorded_loader_does_what_the_loader_does(rank: int, ways: int) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    real = Layer("cpu", rank, ways)
    real.load(tensors.items())

    meta = Layer("meta", rank, ways)
    placed, nbytes = place(meta)
    wants = record_loader(meta.load, CHECKPOINT, placed)

    slices, end = [], 0
    for name, shape in SHAPES.items():
        slices.append(
            StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name=name),
                dtype="F32",
                global_shape=shape,
                offset=(0,) * len(shape),
                shape=shape,
                arena_offset=end,
            )
        )
        end += slices[-1].nbytes
    source = np.concatenate([tensors[name].reshape(-1).numpy().view(np.uint8) for name in SHAPES])
    plan = make_plan([Source(id="actor", layout=Layout.of(slices))], [wants])
    target = np.zeros(nbytes, np.uint8)
    for runs in plan.targets[0].runs.values():
        copy_runs(source, target, runs)

    expected = np.zeros(nbytes, np.uint8)
    for at, parameter in zip(placed, real.parameters(), strict=True):
        flat = parameter.detach().reshape(-1).view(torch.uint8).numpy()
        expected[at.arena_offset : at.arena_offset + flat.size] = flat
    assert np.array_equal(target, expected)
    assert plan.nbytes == sum(p.numel() * p.element_size() for p in real.parameters())


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda p, t: p.copy_(t["q"] * 2), "computes what it copies"),
        (lambda p, t: p[:8].copy_(t["q"][::2]), "no box of it"),
        (lambda _, t: torch.empty(HIDDEN, HIDDEN, device="meta").copy_(t["q"]), "no parameter"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_refused(load: object, why: str) -> None:
    parameter = torch.zeros(HIDDEN, HIDDEN, device="meta")

    def run(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert callable(load)
        load(parameter, dict(tensors))

    loader: Load = run
    with pytest.raises(InvalidRequestError, match=why):
        record_loader(loader, CHECKPOINT, [Placed(tensor=parameter, arena_offset=0)])
