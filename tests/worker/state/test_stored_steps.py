"""Steps of the stored state in host memory give the bits of steps under the lock."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.model.parallelism import Parallelism
from tests.statemanager.conftest import Daemon, daemon_in
from tests.worker.state.stored_step_ranks import NAN_STEP, STEPS, launch
from tests.worker.training.cases import CRITIC_LLAMA, QWEN3_MOE, Case
from tests.worker.training.compiling import COMPILING

HOST = ("optimizer", "host")
BF16 = ("compute_dtype", "bfloat16")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = daemon_in(tmp_path, 256 << 20)
    yield made
    made.clean_up()


@pytest.mark.parametrize(
    "case",
    [
        Case(backend="fsdp", layout=Parallelism(dp=2), options=(HOST,)),
        Case(backend="megatron", layout=Parallelism(dp=2), options=(HOST,)),
        Case(backend="megatron", layout=Parallelism(dp=2), options=(HOST, BF16)),
        pytest.param(
            Case(backend="deepspeed", layout=Parallelism(dp=2), options=(HOST,)), marks=COMPILING
        ),
        pytest.param(
            Case(
                backend="fsdp", layout=Parallelism(dp=2, tp=2), model=CRITIC_LLAMA, options=(HOST,)
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(
                backend="megatron",
                layout=Parallelism(tp=2, dp=2, ep=2),
                model=QWEN3_MOE,
                options=(HOST, BF16),
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(backend="megatron", layout=Parallelism(dp=2, pp=2), options=(HOST,)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda case: case.name,
)
def test_stored_steps_equal_those_under_the_lock(
    case: Case, daemon: Daemon, tmp_path: Path
) -> None:
    under_lock, stored = (
        launch(case, way, tmp_path, daemon.config.listen) for way in ("locked", "stored")
    )
    for wanted, found in zip(under_lock, stored, strict=True):
        assert len(found) == STEPS
        assert [state for state, _ in found] == [state for state, _ in wanted]
        assert [result for _, result in found] == [result for _, result in wanted]
        assert [step for step in range(STEPS) if "error" in found[step][1]] == [NAN_STEP]
        assert found[0][0] != found[2][0]


def test_ranks_step_the_stored_state_together_or_not_at_all(daemon: Daemon, tmp_path: Path) -> None:
    case = Case(backend="fsdp", layout=Parallelism(dp=2), options=(HOST,))
    locked, *others = (
        launch(case, way, tmp_path, daemon.config.listen)
        for way in ("locked", "refused", "unsaved")
    )
    assert others == [locked, locked]
