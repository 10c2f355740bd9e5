"""Backends on vLLM and what the tests of this folder do to them."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.wire.operations import GenerateParams, OperationKind, SamplingParams
from plexrl.worker.interface.backend import BackendCall, BackendResult, RolloutBackend
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.rollout.vllm.installation import INSTALL
from plexrl.worker.state.arena_tensors import view

if TYPE_CHECKING:
    from plexrl.worker.rollout.vllm.backend import VllmRolloutBackend

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason=f"vLLM is not installed: {INSTALL}"
)
# vLLM's own imports warn, and warnings are errors here.
MARKS = [
    pytest.mark.slow,
    NEEDS_VLLM,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

VOCABULARY = "0123456789abcdefghi"
"""22 tokens with the special ones: vLLM pads them to 64."""
PROMPTS = [[3, 4, 5, 6, 7, 8], [9], [10, 11, 12, 13]]
SEQUENCE_MAX = 40


def spec_of(family: str, seed: int) -> ModelSpec:
    """`qwen2` with tied embeddings, `llama` and `qwen3` without."""
    tied = tiny_qwen2(VOCABULARY, seed=seed, hidden=128)
    if family == "qwen2":
        return tied
    config = {**tied.config, "tie_word_embeddings": False, "head_dim": 32}
    return ModelSpec(
        architecture=family,
        config_json=msgspec.json.encode(config).decode(),
        vocabulary=VOCABULARY,
        seed=seed,
    )


def deployment(family: str = "qwen2", **options: Any) -> DeploymentSpec:
    chosen: dict[str, Any] = {
        "model": spec_of(family, 2),
        "kind": "rollout",
        "backend": "vllm",
        "workers": 1,
        "max_sequence_tokens": SEQUENCE_MAX,
        "max_concurrent_samples": 8,
        **options,
    }
    return DeploymentSpec(**chosen)


def trained(family: str, seed: int, dtype: str = "float32") -> Any:
    """A trainer's model: other weights than the rollout's spec makes."""
    return build_model(spec_of(family, seed)).to(getattr(torch, dtype))


def pulled(backend: "VllmRolloutBackend") -> None:
    """Tell a backend that its arena has new weights, as a sync does."""
    backend.after_pull(seq=backend.stats().weights_seq + 1, trainer_step=0)


def write(backend: "VllmRolloutBackend", model: Any) -> None:
    """Replace the arena's weights, as a pull does."""
    new = dict(named_parameters(model))
    for piece in backend.slices():
        view(backend.arena, piece).copy_(new[piece.key.name].data)


def call(
    name: str, seq: int, *, n: int = 2, prompts: Sequence[list[int]] = PROMPTS, **sampling: Any
) -> BackendCall:
    chosen = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True, "seed": 1, **sampling}
    return BackendCall(
        operation=name,
        kind=OperationKind.GENERATE,
        params=GenerateParams(samples_per_prompt=n, sampling=SamplingParams(**chosen)),
        arrays={
            "tokens": np.concatenate([np.array(prompt) for prompt in prompts]),
            "lengths": np.array([len(prompt) for prompt in prompts]),
        },
        seq=seq,
    )


def finish(backend: RolloutBackend) -> dict[str, BackendResult]:
    """Step until nothing is left to do; the results by operation."""
    found: dict[str, BackendResult] = {}
    while backend.has_work:
        found.update(backend.step())
    return found


def generate(backend: RolloutBackend, seq: int, **sampling: Any) -> BackendResult:
    """Run one generation to its end."""
    backend.submit(call("one", seq, **sampling), None)
    return finish(backend)["one"]


def rows_of(result: BackendResult, array: str) -> list[Any]:
    """The result's tokens or logprobs, a row each."""
    ends = np.cumsum(result.arrays["lengths"])[:-1]
    return np.split(result.arrays[array], ends)


def logprobs_by(model: Any, prompt: list[int], tokens: list[int]) -> Any:
    """What a plain forward of the trainer's model gives the drawn tokens."""
    row = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        whole = model(input_ids=row).logits.float().log_softmax(-1)[0, :-1]
    return whole.gather(-1, row[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


def largest_error(result: BackendResult, model: Any, *, start: int = 0) -> float:
    """How far the result's logprobs are from the model's, at most, from token `start` of a row."""
    n = len(result.arrays["lengths"]) // len(PROMPTS)
    errors = [
        np.abs(logprobs - logprobs_by(model, PROMPTS[row // n], tokens.tolist()))[start:].max()
        for row, (tokens, logprobs) in enumerate(
            zip(rows_of(result, "tokens"), rows_of(result, "logprobs"), strict=True)
        )
    ]
    return float(max(errors))


def build(spec: DeploymentSpec, checkpoints: Path) -> "VllmRolloutBackend":
    """A backend, built."""
    from plexrl.worker.rollout.vllm.installation import require_vllm

    require_vllm("cpu")
    from plexrl.worker.rollout.vllm.backend import VllmRolloutBackend

    backend = VllmRolloutBackend(spec, checkpoints)
    backend.lay_out()
    backend.materialise()
    return backend
