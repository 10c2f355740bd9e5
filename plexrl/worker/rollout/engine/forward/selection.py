"""Selects the forward pass for a model, and verifies it against `transformers`.

Shapes: R wanted tokens, V vocabulary.
"""

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.model.architecture.families import families_on
from plexrl.model.memory.kv_cache import BLOCK_TOKENS
from plexrl.worker.rollout.engine.forward.llama import LlamaForward, layer_kinds
from plexrl.worker.rollout.engine.forward.module import ModuleForward
from plexrl.worker.rollout.engine.kv_pool import CacheSize, KvPool
from plexrl.worker.rollout.engine.step_batch import StepBatch, Work, build_batch
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup
from plexrl.worker.rollout.rollout_engine import block_count

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the length of the input."""
PROBE_TOKENS = 7


class ForwardPass(Protocol):
    """A forward pass over the paged KV cache."""

    def __call__(self, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        """Logits `[R, V]` of the wanted tokens; writes keys and values of all tokens to `pool`."""
        ...


def select_forward(model: Any, positions: int, ranks: RankGroup | None = None) -> "ForwardPass":
    """The fastest correct pass for this model, for positions below `positions`.

    With `ranks`, the model's parameters are this rank's parts (`shards.box_of`).

    Raises:
        InvalidRequestError: a layer is not full attention over all positions, or the model's
            architecture cannot be split over ranks.
    """
    config = model.config
    kinds = set(layer_kinds(config))
    has_own_pass = config.model_type in families_on("torch") and _rotates_alike(config, kinds)
    if kinds <= {"full_attention", "sliding_attention"} and has_own_pass:
        return LlamaForward(model, positions, ranks)
    slides = "sliding_attention" in kinds
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"} or (slides and (window or 0) < positions):
        raise InvalidRequestError(
            f"for model type {config.model_type!r} the torch engine supports full attention only, "
            f"and it has layers of kind {', '.join(sorted(kinds))}: use one of the model types "
            f"{', '.join(families_on('torch'))}, another rollout backend, or a "
            "max_sequence_tokens within the window"
        )
    if ranks is not None:
        raise InvalidRequestError(
            f"model type {config.model_type!r} cannot be split over workers: use 1 worker, or one "
            f"of the model types {', '.join(families_on('torch'))}"
        )
    return ModuleForward(model)


def _rotates_alike(config: Any, kinds: set[str]) -> bool:
    """Whether the frequencies of all layers are independent of the length of the input."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope[kind] for kind in kinds] if kinds <= rope.keys() else [rope]
    return all(one.get("rope_type", "default") in STATIC_ROPE for one in each)


def weight_device(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the parameters."""
    first = next(model.parameters())
    return first.device, first.dtype


def cache_shape(model: nn.Module, ranks: int = 1) -> tuple[int, int, int]:
    """(layers, key-value heads per rank, head size).

    Raises:
        InvalidRequestError: `ranks` does not divide the key-value heads.
    """
    config: Any = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if kv_heads % ranks:
        raise InvalidRequestError(
            f"{kv_heads} key-value heads cannot be divided among {ranks} workers: choose a divisor"
        )
    return config.num_hidden_layers, kv_heads // ranks, head_size


def cache_size(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    tp: int,
    slots: int,
    sequence_tokens_max: int,
    kv_bytes_max: int | None,
    block_tokens: int = BLOCK_TOKENS["torch"],
) -> CacheSize:
    """The cache of each of `tp` ranks, for keys and values of `dtype`; the model may be on `meta`.
    Other arguments as of `Engine`, which raises the same errors."""
    layers, heads, head_size = cache_shape(model, tp)
    size = CacheSize(
        layers=layers,
        heads=heads,
        head_size=head_size,
        blocks=0,
        block_tokens=block_tokens,
        dtype=dtype,
    )
    blocks = block_count(kv_bytes_max, size.block_bytes, block_tokens, sequence_tokens_max, slots)
    return replace(size, blocks=blocks)


@torch.inference_mode()
def probe(model: Any) -> torch.Tensor:
    """The logprobs `[V]` that the model itself computes on the CPU after a few tokens, for
    `verify_forward`."""
    tokens = torch.from_numpy(_probe_tokens(model)).long()
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0, -1].float().log_softmax(-1)


@torch.inference_mode()
def verify_forward(forward: ForwardPass, model: Any, wanted: torch.Tensor, ranks: int = 1) -> None:
    """Compare a pass with the result of `probe`.

    Raises:
        InvalidRequestError: they differ, so the engine would draw wrong tokens. Some architectures
            scale or cap their logits outside the decoder, or need inputs that the engine lacks.
    """
    device, dtype = weight_device(model)
    layers, heads, head_size = cache_shape(model, ranks)
    pool = KvPool(
        layers=layers,
        heads=heads,
        head_size=head_size,
        blocks=3,
        block_tokens=4,
        dtype=dtype,
        device=device,
    )
    pool.prepare()
    batch = build_batch(
        Work(slots=np.array([0]), starts=np.array([0]), lengths=np.array([PROBE_TOKENS])),
        [0],
        tokens=_probe_tokens(model),
        tables=np.array([[1, 2]]),
        known=np.array([PROBE_TOKENS]),
        block_tokens=4,
        device=device,
        dtype=dtype,
    )
    found = forward(batch, pool)[-1].float().log_softmax(-1).cpu()
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    if not torch.allclose(found, wanted, atol=tolerance, rtol=tolerance):
        raise InvalidRequestError(
            f"for model type {model.config.model_type!r} the torch engine's logprobs differ from "
            f"those of transformers by {float((found - wanted).abs().max()):.2g}: use another "
            "rollout backend for it"
        )


def _probe_tokens(model: Any) -> npt.NDArray[np.int32]:
    return np.arange(PROBE_TOKENS, dtype=np.int32)[None] % np.int32(model.config.vocab_size)
