"""SGD and Muon on shards, against torch's optimizers of whole parameters."""

from pathlib import Path

import pytest
import torch

from plexrl.model.parallelism import Parallelism
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.host.optimizer import step_of_torch
from tests.worker.training.cases import CRITIC, QWEN3, Case
from tests.worker.training.optimizer_ranks import STEPS, launch
from tests.worker.training.ranks import assembled

Tensors = dict[str, torch.Tensor]
RATE, DECAY = 1e-2, 0.1
SGD = AdamParams(learning_rate=RATE, weight_decay=DECAY, optimizer="sgd", momentum=0.8)
MUON = AdamParams(learning_rate=RATE, weight_decay=DECAY, optimizer="muon")
TWO = Parallelism(dp=2)


def optimizers(params: AdamParams, own: Tensors) -> list[torch.optim.Optimizer]:
    if params.optimizer == "sgd":
        return [
            torch.optim.SGD(
                own.values(), lr=RATE, momentum=params.momentum or 0.0, weight_decay=DECAY
            )
        ]
    matrices = [p for name, p in own.items() if p.dim() == 2 and ".layers." in name]
    others = [p for p in own.values() if all(p is not matrix for matrix in matrices)]
    assert len(matrices) == 14
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95)),
    ]


@pytest.mark.parametrize(
    ("case", "params"),
    [
        pytest.param(Case(backend="fsdp", layout=TWO, model=QWEN3), MUON, id="muon"),
        pytest.param(
            Case(backend="fsdp", layout=Parallelism(dp=3), model=QWEN3),
            MUON,
            id="muon, uneven rows",
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(backend="fsdp"), MUON, id="muon, one rank", marks=pytest.mark.slow),
        pytest.param(
            Case(backend="fsdp", layout=Parallelism(tp=2), model=QWEN3), MUON, id="muon, tp"
        ),
        pytest.param(
            Case(backend="fsdp", layout=Parallelism(dp=2, tp=2), model=CRITIC),
            MUON,
            id="muon, dp and tp, a critic",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(backend="deepspeed", layout=TWO, model=QWEN3), MUON, id="muon, deepspeed"
        ),
        pytest.param(
            Case(backend="deepspeed", layout=Parallelism(dp=3)),
            MUON,
            id="muon, deepspeed, uneven parts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(backend="fsdp", layout=Parallelism(tp=2)),
            SGD,
            id="sgd, tp",
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(backend="fsdp", layout=TWO), SGD, id="sgd"),
        pytest.param(
            Case(backend="megatron", layout=TWO), SGD, id="sgd, megatron", marks=pytest.mark.slow
        ),
        pytest.param(
            Case(backend="deepspeed", layout=TWO), SGD, id="sgd, deepspeed", marks=pytest.mark.slow
        ),
    ],
)
def test_steps_are_those_of_torch_on_the_whole_model(
    case: Case, params: AdamParams, tmp_path: Path
) -> None:
    records = launch(case, params, tmp_path)
    own = assembled([record[0]["before"] for record in records], StatePart.PARAMETER)
    own = {name: torch.nn.Parameter(value.clone()) for name, value in own.items()}
    plain = optimizers(params, own)
    for step in range(STEPS):
        gradients = assembled([record[step]["gradients"] for record in records], StatePart.GRADIENT)
        for name, parameter in own.items():
            parameter.grad = gradients[name].clone()
        for each in plain:
            each.step()
        found = assembled([record[step]["after"] for record in records], StatePart.PARAMETER)
        assert set(found) == set(own)
        for name, parameter in own.items():
            assert torch.allclose(found[name], parameter, rtol=1e-5, atol=1e-6), (step, name)


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_sgd_in_chunks_is_that_of_torch(momentum: float | None) -> None:
    params = AdamParams(learning_rate=RATE, weight_decay=DECAY, optimizer="sgd", momentum=momentum)
    generator = torch.Generator().manual_seed(0)
    parameter, plain = (torch.nn.Parameter(torch.ones(10)) for _ in range(2))
    first, second, count = torch.zeros(10), torch.zeros(10), torch.zeros(())
    optimizer = torch.optim.SGD([plain], lr=RATE, momentum=momentum or 0.0, weight_decay=DECAY)
    for _ in range(4):
        gradient = torch.randn(10, generator=generator)
        plain.grad = gradient.clone()
        optimizer.step()
        with torch.no_grad():
            for part in (slice(0, 3), slice(3, 10)):
                kept = (first[part], second[part])
                step_of_torch(params, count, parameter[part], gradient[part], *kept)
        assert torch.allclose(parameter, plain, atol=1e-7)
    assert not second.any()
