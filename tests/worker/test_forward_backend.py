"""The backend of forward deployments, against `transformers` on the same weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from plexrl.errors import BatchShapeError, CheckpointNotFoundError, InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import ModelSpec, parameter_count, tiny_qwen2
from plexrl.statemanager.layout.keys import StatePart
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import CheckpointParams, ForwardParams, OperationKind
from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.forward.backend import ForwardBackend
from plexrl.worker.interface.backend import BackendCall
from plexrl.worker.models import build_model

CAUSAL = tiny_qwen2("0123456789abcdefghi", seed=1, hidden=32)
REWARD = tiny_qwen2("0123456789abcdefghi", seed=1, hidden=32, head="reward")
GEMMA3 = {
    **CAUSAL.config,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "final_logit_softcapping": 2.0,
}
"""Rows are longer than the window."""
ROWS = [[3, 4, 5], [6], [7, 8, 9, 10, 2], [11, 12], [3, 0], [4, 0, 0]]
"""The last two end with the padding token, which is a token like any other here."""


def batch() -> Arrays:
    return {
        "tokens": np.array([token for row in ROWS for token in row], dtype=np.int32),
        "lengths": np.array([len(row) for row in ROWS], dtype=np.int32),
    }


def made(model: ModelSpec, folder: Path, dtype: str = "float32") -> ForwardBackend:
    spec = DeploymentSpec(model=model, kind="forward", backend="torch", workers=1, dtype=dtype)
    backend = ForwardBackend(spec, 0, 1, folder)
    backend.lay_out()
    backend.materialise()
    return backend


def forward(backend: ForwardBackend, arrays: Arrays, micro_batches: int = 1) -> dict[str, Array]:
    call = BackendCall(
        operation="o",
        kind=OperationKind.FORWARD,
        params=ForwardParams(),
        share=RankShare(micro_batches=micro_batches),
        arrays=arrays,
        seq=0,
    )
    return backend.run(call).arrays


def load(backend: ForwardBackend, name: str) -> None:
    params = CheckpointParams(name=name)
    kind = OperationKind.LOAD_CHECKPOINT
    call = BackendCall(operation="o", kind=kind, params=params, job="j", arrays={}, seq=1)
    backend.run(call)


def alone(model: torch.nn.Module, row: list[int]) -> Array:
    """Logprobs of one row without padding; the first entry is 0."""
    logits = model(input_ids=torch.tensor([row])).logits[0]
    chosen = logits.log_softmax(-1)[range(len(row) - 1), row[1:]]
    found: Array = torch.cat([torch.zeros(1), chosen]).detach().numpy()
    return found


@pytest.mark.parametrize("micro_batches", [1, 3, 9])
def test_logprobs_are_those_of_each_row_alone(tmp_path: Path, micro_batches: int) -> None:
    found = forward(made(CAUSAL, tmp_path), batch(), micro_batches)["logprobs"]
    model = build_model(CAUSAL)
    assert np.allclose(found, np.concatenate([alone(model, row) for row in ROWS]), atol=1e-5)


@pytest.mark.parametrize("hosts_layers", [False, True])
def test_a_model_with_windows_and_scaled_embeddings_has_the_logprobs_of_transformers(
    tmp_path: Path, hosts_layers: bool
) -> None:
    spec = ModelSpec(architecture="gemma3_text", config_json=json.dumps(GEMMA3), seed=1)
    deployment = DeploymentSpec(
        model=spec,
        kind="forward",
        backend="torch",
        workers=1,
        layers_on_device=2 if hosts_layers else None,
    )
    backend = ForwardBackend(deployment, 0, 1, tmp_path)
    backend.lay_out()
    backend.materialise()
    found = forward(backend, batch())["logprobs"]
    model = build_model(spec)
    assert np.allclose(found, np.concatenate([alone(model, row) for row in ROWS]), atol=1e-5)
    assert parameter_count(spec) == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("micro_batches", [1, 3, 9])
def test_scores_are_those_of_each_rows_last_token(tmp_path: Path, micro_batches: int) -> None:
    found = forward(made(REWARD, tmp_path), batch(), micro_batches)["scores"]
    assert found.shape == (len(ROWS),)
    model: Any = build_model(REWARD)
    # What `transformers` calls padding would move the place that it scores.
    model.config.pad_token_id = -1
    for row, score in zip(ROWS, found, strict=True):
        wanted = model(input_ids=torch.tensor([row])).logits
        assert wanted.shape == (1, 1)
        assert score == pytest.approx(wanted.item(), abs=1e-5)


def test_a_rank_without_rows_answers_with_none(tmp_path: Path) -> None:
    assert forward(made(CAUSAL, tmp_path), {}, 2)["logprobs"].shape == (0,)
    assert forward(made(REWARD, tmp_path), {}, 2)["scores"].shape == (0,)


def test_weights_are_all_its_state(tmp_path: Path) -> None:
    for model in (CAUSAL, REWARD):
        backend = made(model, tmp_path)
        assert {piece.key.part for piece in backend.slices()} == {StatePart.PARAMETER}
        assert sum(piece.nbytes for piece in backend.slices()) == 4 * parameter_count(model)
    half = made(CAUSAL, tmp_path, dtype="bfloat16")
    assert sum(piece.nbytes for piece in half.slices()) == 2 * parameter_count(CAUSAL)
    found = forward(half, batch())["logprobs"]
    wanted = forward(made(CAUSAL, tmp_path), batch())["logprobs"]
    assert found.dtype == np.float32
    assert 0 < np.abs(found - wanted).max() < 0.1


def test_a_checkpoint_and_a_directory_bring_the_same_weights(tmp_path: Path) -> None:
    other = build_model(tiny_qwen2("0123456789abcdefghi", seed=2, hidden=32, head="reward"))
    folder = tmp_path / "j" / "other"
    other.save_pretrained(folder)  # type: ignore[operator]
    loaded = made(REWARD, tmp_path)
    load(loaded, "other")
    opened = made(ModelSpec(path=str(folder), head="reward"), tmp_path)
    assert np.array_equal(forward(loaded, batch())["scores"], forward(opened, batch())["scores"])
    assert not np.array_equal(
        forward(loaded, batch())["scores"], forward(made(REWARD, tmp_path), batch())["scores"]
    )


def test_a_critic_gives_the_value_of_each_token_and_opens_as_a_reward_model(
    tmp_path: Path,
) -> None:
    critic = tiny_qwen2("0123456789abcdefghi", seed=1, hidden=32, head="value")
    backend = made(critic, tmp_path)
    arrays = batch()
    found = forward(backend, arrays, micro_batches=3)
    assert set(found) == {"values"}
    model: Any = build_model(critic)
    first = 0
    for row in ROWS:
        hidden = model.model(torch.tensor([row])).last_hidden_state[0]
        wanted = [0.0, *(hidden @ model.score.weight[0]).tolist()[:-1]]
        values = found["values"][first : first + len(row)]
        assert np.allclose(values, wanted, atol=1e-5)
        first += len(row)
    model.save_pretrained(tmp_path / "critic")
    opened = made(ModelSpec(path=str(tmp_path / "critic"), head="reward"), tmp_path)
    assert np.array_equal(
        forward(opened, arrays)["scores"], forward(made(REWARD, tmp_path), arrays)["scores"]
    )


def test_weights_of_another_head_are_refused_and_change_nothing(tmp_path: Path) -> None:
    build_model(CAUSAL).save_pretrained(tmp_path / "j" / "causal")  # type: ignore[operator]
    backend = made(REWARD, tmp_path)
    before = forward(backend, batch())["scores"]
    with pytest.raises(BatchShapeError, match=r"score\.weight"):
        load(backend, "causal")
    with pytest.raises(CheckpointNotFoundError):
        load(backend, "absent")
    assert np.array_equal(forward(backend, batch())["scores"], before)
    with pytest.raises(InvalidRequestError, match=r"lacks 1 .*score\.weight"):
        build_model(ModelSpec(path=str(tmp_path / "j" / "causal"), head="reward"))


def test_a_directory_in_shards_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    build_model(CAUSAL).save_pretrained(tmp_path, max_shard_size="40KB")  # type: ignore[operator]
    for shard in tmp_path.glob("model-*.safetensors"):
        tensors = load_file(shard)
        if tensors.pop("model.norm.weight", None) is not None:
            save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(InvalidRequestError, match=r"lacks 1 .*model\.norm\.weight"):
        build_model(ModelSpec(path=str(tmp_path)))
