"""A batch in parts gives the gradient and the step of the whole batch, on real ranks."""

from pathlib import Path

import pytest

import plexrl
from plexrl.model.parallelism import Parallelism
from tests.worker.training.cases import CRITIC, QWEN2, Case
from tests.worker.training.deferred_ranks import SPLITS, launch

LOSSES = {
    "tokens": (plexrl.losses.ppo(), plexrl.losses.ppo(reduction="sum")),
    "rows": (
        plexrl.losses.grpo(kl_coef=0.1),
        plexrl.losses.grpo(kl_coef=0.1, reduction="sequence_sum"),
    ),
    "values": (plexrl.losses.value(), plexrl.losses.value(reduction="sum")),
}


@pytest.mark.parametrize(
    ("backend", "reduction", "dp"),
    [
        ("fsdp", "tokens", 2),
        ("deepspeed", "rows", 2),
        # How a loss is summed and how a backend reduces do not depend on each other.
        pytest.param("fsdp", "rows", 2, marks=pytest.mark.slow),
        pytest.param("deepspeed", "tokens", 2, marks=pytest.mark.slow),
        pytest.param("fsdp", "tokens", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", "values", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", "values", 2, marks=pytest.mark.slow),
    ],
)
def test_uneven_parts_on_uneven_replicas_give_the_gradient_of_the_whole_batch(
    backend: str, reduction: str, dp: int, tmp_path: Path
) -> None:
    """Parts have from 1 to 9 rows of 1 to 8 tokens: with two replicas, one has no rows at times."""
    loss, summed = LOSSES[reduction]
    model = CRITIC if reduction == "values" else QWEN2
    case = Case(backend=backend, layout=Parallelism(dp=dp), model=model)
    differences = launch(case, loss, summed, tmp_path)
    assert len(differences) == SPLITS
    assert max(max(each) for each in differences) <= 1e-6
    assert max(each[0] for each in differences) > 0, "nothing was computed in another order"
