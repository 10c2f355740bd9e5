"""Low-rank adapters (LoRA, Hu et al. 2021): target layers, sizes and PEFT's names. Pure.

A linear layer W gets two small matrices and computes W x + (alpha / rank) · B A x. W is frozen. A
deployment trains, saves, publishes and moves A and B.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.limits import LIMITS
from plexrl.model.spec import ModelSpec

ADAPTER_PREFIX = "base_model.model."
"""PEFT's prefix of the module's name in the names of its adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Adapters of one deployment. B starts at zero, so training starts with the unchanged model."""

    rank: int
    """Rows of A, columns of B: 1 to 1024."""
    alpha: float = 16.0
    """B A is multiplied by alpha / rank. Above 0."""
    targets: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Names of the linear layers that get adapters, in every decoder layer."""
    seed: int = 0
    """Seed of A's initial values: same seed, same bits."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def linear_sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers that can have adapters, by name: of attention, and of
    the MLP. Experts and linear attention have none.

    Raises:
        InvalidRequestError: the model's configuration lacks a size.
    """
    sizes = spec.dimensions
    hidden, mlp = sizes.hidden, sizes.mlp
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    found = {"qkv_proj": (hidden, queries + 2 * keys)}
    if not sizes.fuses_qkv:
        gated = queries * (2 if sizes.gates_attention else 1)
        found = {"q_proj": (hidden, gated), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    found["o_proj"] = (queries, hidden)
    if sizes.experts:
        return found
    if sizes.fuses_gate_and_up:
        found["gate_up_proj"] = (hidden, 2 * mlp)
    else:
        found |= {"gate_proj": (hidden, mlp), "up_proj": (hidden, mlp)}
    found["down_proj"] = (mlp, hidden)
    return found


def adapter_parameter_count(spec: ModelSpec, lora: LoraSpec) -> int:
    """Number of parameters of all adapters.

    Raises:
        InvalidRequestError: rank or alpha is invalid, or the model lacks a target.
    """
    for name, bounds in LIMITS["lora"].items():
        bounds.check(f"lora.{name}", getattr(lora, name))
    sizes = linear_sizes(spec)
    unknown = sorted(set(lora.targets) - set(sizes))
    if unknown or not lora.targets or len(set(lora.targets)) < len(lora.targets):
        raise InvalidRequestError(
            f"lora.targets is {list(lora.targets)}: name each layer that gets an adapter once; the "
            f"layers of this model that can have one are {', '.join(sizes)}"
        )
    smallest = min(lora.targets, key=lambda target: min(sizes[target]))
    if lora.rank > min(sizes[smallest]):
        inputs, outputs = sizes[smallest]
        raise InvalidRequestError(
            f"lora.rank is {lora.rank}, and {smallest} has {inputs} inputs and {outputs} outputs: "
            f"rank {min(inputs, outputs)} can change all of it; lower the rank, or leave "
            f"{smallest} out of lora.targets",
            parameter="lora.rank",
        )
    of_mlp = {"gate_up_proj", "gate_proj", "up_proj", "down_proj"}
    layers, attention_layers = spec.dimensions.layers, spec.dimensions.attention_layers
    counts = {target: layers if target in of_mlp else attention_layers for target in lora.targets}
    return sum(counts[target] * sum(sizes[target]) for target in lora.targets) * lora.rank


def adapter_names(module: str) -> tuple[str, str]:
    """PEFT's names of A and B of a module (`model.layers.0.self_attn.q_proj`)."""
    prefix = f"{ADAPTER_PREFIX}{module}"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


def are_adapters(names: Iterable[str]) -> bool:
    """Whether these are names of adapters only, and at least one."""
    found = list(names)
    return bool(found) and all(
        name.startswith(ADAPTER_PREFIX) and (".lora_A." in name or ".lora_B." in name)
        for name in found
    )


def adapter_config(spec: ModelSpec, lora: LoraSpec) -> bytes:
    """PEFT's `adapter_config.json`."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    return msgspec.json.format(msgspec.json.encode(config), indent=2)
