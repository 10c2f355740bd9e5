"""Paced trainers: the same bits for the same calls, and the modelled time of each."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from plexrl.errors import InvalidRequestError
from plexrl.latency.pace import parse_pace
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import AdamParams, OperationKind
from plexrl.worker.interface.backend import BackendCall, BackendResult
from plexrl.worker.training.paced.backend import PacedTrainingBackend
from tests.worker.paced.clock import Clock

PACE = "h800:qwen2.5-14b@0.01"
WORKERS = 3


class Trainer:
    """One rank of a trainer, on a clock of its own."""

    def __init__(self, rank: int = 0, pace: str = PACE) -> None:
        spec = DeploymentSpec(
            model=tiny_qwen2("0123456789", seed=5),
            kind="train",
            backend="fsdp",
            workers=WORKERS,
            pace=pace,
        )
        self.clock = Clock()
        found = parse_pace(pace)
        self.backend = PacedTrainingBackend(spec, rank, found, self.clock.pacer(found.scale))
        self.backend.lay_out()
        self.backend.materialise()

    def run(self, kind: OperationKind, params: Any = None, **arrays: Any) -> BackendResult:
        call = BackendCall(
            operation="o",
            kind=kind,
            params=params,
            arrays=arrays,
            seq=1,
            share=RankShare(denominator=1.0),
        )
        return self.backend.run(call)

    def step(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        arrays = {
            "tokens": rng.integers(0, 13, 40).astype(np.int32),
            "mask": np.ones(40, dtype=np.float32),
        }
        self.run(OperationKind.FORWARD_BACKWARD, **arrays)
        self.run(OperationKind.OPTIM_STEP, AdamParams(learning_rate=1e-2))

    def state(self) -> bytes:
        return bytes(self.backend.arena.buffer)  # type: ignore[attr-defined]


def test_the_same_calls_give_the_same_bits() -> None:
    one, other = Trainer(), Trainer()
    for seed in range(4):
        one.step(seed)
        other.step(seed)
    assert one.state() == other.state()
    assert one.backend.trainer_step == 4


@pytest.mark.parametrize("changed", ["order", "batch", "rank"])
def test_what_differs_in_the_calls_differs_in_the_bits(changed: str) -> None:
    one, other = Trainer(), Trainer(rank=1 if changed == "rank" else 0)
    for seed in (1, 2):
        one.step(seed)
    for seed in {"order": (2, 1), "batch": (1, 3), "rank": (1, 2)}[changed]:
        other.step(seed)
    assert one.state() != other.state()


def test_each_operation_sleeps_its_modelled_time() -> None:
    trainer = Trainer()
    training = parse_pace(PACE).training(WORKERS)
    tokens = np.arange(2000, dtype=np.int32)
    trainer.run(OperationKind.FORWARD, tokens=tokens)
    trainer.run(OperationKind.FORWARD_BACKWARD, tokens=tokens)
    trainer.run(OperationKind.OPTIM_STEP, AdamParams(learning_rate=1e-2))
    # All data ranks have about as many tokens as this one.
    whole = WORKERS * len(tokens)
    wanted = [training.log_prob_s(whole), training.update_s(whole), training.step_s()]
    assert trainer.clock.sleeps == pytest.approx([0.01 * each for each in wanted])


def test_a_step_without_gradients_changes_nothing() -> None:
    trainer = Trainer()
    before = trainer.state()
    found = trainer.run(OperationKind.OPTIM_STEP, AdamParams(learning_rate=1e-2))
    assert found.result["error"]["code"] == "no_gradients"
    assert trainer.state() == before


def test_checkpoints_are_refused_before_anything_changes() -> None:
    trainer = Trainer()
    before = trainer.state()
    with pytest.raises(InvalidRequestError, match="paced deployment has no load_checkpoint"):
        trainer.run(OperationKind.LOAD_CHECKPOINT)
    assert trainer.state() == before


def test_ranks_divide_one_parameter_without_gaps() -> None:
    pieces = [Trainer(rank).backend.slices()[0] for rank in range(WORKERS)]
    end = 0
    for piece in pieces:
        assert piece.offset == (end,)
        end += piece.shape[0]
    assert pieces[0].global_shape == (end,)


@pytest.mark.parametrize("then", ["", "Worker._is_peer_loss(None, ValueError());"])
def test_a_paced_worker_imports_no_torch_also_when_an_operation_fails(then: str) -> None:
    code = (
        "import sys, plexrl.worker.process.start, plexrl.worker.agent.launcher;"
        "from plexrl.worker.process.worker import Worker;"
        f"{then}"
        "sys.exit(any(name.split('.')[0] in ('torch', 'transformers') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
