"""Forward deployments on Megatron: every layout gives what one process of `transformers` gives."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from plexrl.model.capabilities import backend_capabilities
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, parameter_count
from plexrl.router.dispatch.plan import DispatchPlan, plan_batch
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import CheckpointParams, ForwardParams, OperationKind
from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.interface.backend import Backend, BackendCall
from plexrl.worker.models import build_model
from plexrl.worker.process.backend_factory import make_backend
from tests.worker.training.cases import LLAMA, QWEN2, QWEN3, QWEN3_MOE, THREE_LAYERS, resized

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

ROWS = [[3, 4, 5], [6], [7, 8, 9, 10, 2], [11, 12], [3, 0], [4, 0, 0], [13, 14, 15, 16]]
MICRO_BATCH_TOKENS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model under a layout."""

    layout: Parallelism
    model: ModelSpec = QWEN2
    dtype: str = "float32"
    is_slow: bool = False

    @property
    def spec(self) -> DeploymentSpec:
        return DeploymentSpec(
            model=self.model,
            kind="forward",
            backend="megatron",
            workers=self.layout.world_size,
            parallelism=self.layout,
            dtype=self.dtype,
        )

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == "float32" else 0.1


def reward(model: ModelSpec) -> ModelSpec:
    return replace(model, head="reward")


WIDE = resized(LLAMA, "llama", head_dim=32)
"""A head size that aligns in bfloat16."""

CASES = (
    Case(layout=Parallelism(tp=2, ep=2), model=QWEN3_MOE),
    Case(layout=Parallelism(tp=2, ep=2), model=reward(QWEN3_MOE)),
    Case(layout=Parallelism(cp=2), model=LLAMA),
    Case(layout=Parallelism(tp=2, cp=2, pp=2), model=QWEN2, is_slow=True),
    Case(layout=Parallelism(tp=2, pp=2), model=reward(QWEN2), is_slow=True),
    Case(layout=Parallelism(dp=2, tp=2), model=reward(LLAMA), is_slow=True),
    Case(layout=Parallelism(tp=2), model=QWEN3, is_slow=True),
    Case(layout=Parallelism(tp=2), model=WIDE, dtype="bfloat16", is_slow=True),
    Case(layout=Parallelism(pp=2), model=THREE_LAYERS, is_slow=True),
    Case(layout=Parallelism(dp=2, tp=2, pp=2, ep=2), model=QWEN3_MOE, is_slow=True),
    Case(layout=Parallelism(dp=2, tp=2, pp=2, ep=4), model=reward(QWEN3_MOE), is_slow=True),
)


def case_id(case: Case) -> str:
    words = [str(case.model.architecture), case.model.head, case.dtype, case.layout.describe()]
    return "-".join(words).replace(" ", "-").replace("=", "")


def batch() -> Arrays:
    return {
        "tokens": np.array([token for row in ROWS for token in row], dtype=np.int32),
        "lengths": np.array([len(row) for row in ROWS], dtype=np.int32),
    }


def plan_of(case: Case) -> DispatchPlan:
    return plan_batch(
        case.layout,
        batch()["lengths"].tolist(),
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        packs=backend_capabilities("forward", "megatron").packs,
    )


def run_rank(rank: int, case: Case, folder: str) -> None:
    """What one rank returns: at first, and with the weights of a checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", case.layout.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.layout.world_size,
    )
    backend = make_backend(case.spec, rank, case.layout.world_size, Path(folder))
    backend.lay_out()
    backend.materialise()
    before = forward(backend, case, rank)
    params = CheckpointParams(name="other")
    kind = OperationKind.LOAD_CHECKPOINT
    backend.run(BackendCall(operation="o", kind=kind, params=params, job="j", arrays={}, seq=1))
    after = forward(backend, case, rank)
    held = {(piece.key, piece.offset, piece.shape) for piece in backend.slices()}
    assert {key.part for key, _, _ in held} == {StatePart.PARAMETER}
    elements = sum(int(np.prod(shape)) for _, _, shape in held)
    torch.save({"before": before, "after": after, "elements": elements}, f"{folder}/{rank}.pt")


def forward(backend: Backend, case: Case, rank: int) -> Arrays:
    plan = plan_of(case)
    call = BackendCall(
        operation="o",
        kind=OperationKind.FORWARD,
        params=ForwardParams(entropy=case.model.head == "causal"),
        share=RankShare(micro_batches=plan.micro_batches),
        arrays=plan.inputs(batch())[plan.part_of(rank)],
        seq=0,
    )
    return backend.run(call).arrays


def alone(model: Any, row: list[int], head: str) -> Array:
    """Logprobs of one row, of which the first is 0; or its score."""
    logits = model(input_ids=torch.tensor([row])).logits.detach()
    if head == "reward":
        found: Array = logits[0].float().numpy()
        return found
    chosen = logits[0].float().log_softmax(-1)[range(len(row) - 1), row[1:]]
    logprobs: Array = torch.cat([torch.zeros(1), chosen]).numpy()
    return logprobs


def wanted_of(case: Case, model: Any) -> Array:
    # What `transformers` calls padding would move the place that it scores.
    model.config.pad_token_id = -1
    return np.concatenate([alone(model, row, case.model.head) for row in ROWS])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case_id(case), marks=[pytest.mark.slow] if case.is_slow else [])
        for case in CASES
    ],
)
def test_every_layout_gives_what_one_process_gives(case: Case, tmp_path: Path) -> None:
    other = build_model(replace(case.model, seed=9))
    other.save_pretrained(tmp_path / "j" / "other")  # type: ignore[operator]
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        run_rank,
        args=(case, str(tmp_path)),
        nprocs=case.layout.world_size,
        start_method="forkserver",
    )
    ranks = range(case.layout.world_size)
    records = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in ranks]
    name = "scores" if case.model.head == "reward" else "logprobs"
    plan = plan_of(case)
    join = plan.join_rows if name == "scores" else plan.join
    for moment, model in (("before", build_model(case.model)), ("after", other)):
        found = join({rank: records[rank][moment][name] for rank in case.layout.output_ranks})
        assert np.abs(found - wanted_of(case, model)).max() <= case.tolerance
    # Of one replica, only norms, routers, the score and tied embeddings are on several ranks.
    held = sum(record["elements"] for record in records) / case.layout.dp / case.layout.cp
    whole = parameter_count(case.model)
    parts = case.layout.tp * case.layout.pp
    assert held / parts < 0.75 * whole or parts == 1
