"""The table of training backends and layouts that have to agree. A new backend adds rows here.

Every case runs all of `test_conformance.py` on real gloo ranks of its own.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, tiny_qwen2

VOCABULARY = "0123456789abcdefghij"
"""With three special tokens: a size that no even number of ranks divides."""

QWEN2 = tiny_qwen2(VOCABULARY, seed=1)
"""Tied embeddings, biases, two key-value heads for four."""


def resized(model: ModelSpec, architecture: str, **changes: Any) -> ModelSpec:
    """A model of another architecture, or other sizes."""
    return ModelSpec(
        architecture=architecture,
        config_json=json.dumps({**model.config, **changes}),
        vocabulary=model.vocabulary,
        seed=model.seed,
    )


CRITIC = replace(QWEN2, head="value")
"""Every rank of a tensor part has its whole head; of data ranks the first has it."""

CRITIC_LLAMA = replace(resized(QWEN2, "llama", tie_word_embeddings=False), head="value")

QWEN3 = resized(QWEN2, "qwen3", head_dim=16)
"""Norms of queries and keys."""

QWEN3_MOE = resized(
    QWEN3,
    "qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)

THREE_LAYERS = resized(QWEN3_MOE, "qwen3_moe", num_hidden_layers=3, num_experts=2)
"""Pipeline stages with unequal numbers of layers."""

MIXTRAL = resized(QWEN2, "mixtral", num_local_experts=3, num_experts_per_tok=2)
"""As many experts as no two ranks divide equally."""

GEMMA3 = resized(
    QWEN2,
    "gemma3_text",
    head_dim=16,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=4,
    final_logit_softcapping=2.0,
)
"""Windows shorter than the rows, norms around 1, scaled embeddings, capped logits."""

GLM4 = resized(QWEN2, "glm4", head_dim=16, tie_word_embeddings=False)
"""Interleaved rotations, norms of outputs, a joint gate and up projection."""

PHI3 = resized(QWEN2, "phi3", sliding_window=4)
"""Joint projections of queries, keys and values too."""

GPT_OSS = resized(
    QWEN2,
    "gpt_oss",
    head_dim=16,
    sliding_window=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
"""Sinks, windows in every second layer, experts with biases and a clamped gate."""

QWEN3_5 = resized(
    QWEN2,
    "qwen3_5_text",
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
"""Linear attention, and attention with a gate and a rotation of a quarter of a head."""

QWEN3_5_MOE = resized(
    QWEN3_5,
    "qwen3_5_moe_text",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=24,
)

LLAMA = resized(QWEN2, "llama", tie_word_embeddings=False)

BIASED = resized(QWEN2, "llama", attention_bias=True, mlp_bias=True)
"""Biases of what is cut by columns and of what is cut by rows."""

NARROW = resized(QWEN2, "qwen3", head_dim=4)
"""Over three ranks one has nothing of the norms of heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One backend under one layout."""

    backend: str
    layout: Parallelism = Parallelism()
    model: ModelSpec = QWEN2
    options: tuple[tuple[str, Any], ...] = ()
    """Further fields of the `DeploymentSpec`."""
    tolerance: float = 1e-5
    """Largest difference of logprobs from the reference, and of gradients relative to the largest
    one of the same parameter."""
    is_slow: bool = False
    """Left to `make test-all`: what has more ranks than a small machine has cores, or says little
    that another case does not."""
    compiles: bool = False
    """A kernel, on first use on a machine; left to `make test-all` too."""

    @property
    def name(self) -> str:
        """Name of the test, its deployment and its checkpoint."""
        words = [self.backend, *self.layout.describe().split()]
        words += [] if self.model.architecture == "qwen2" else [str(self.model.architecture)]
        words += [] if self.model.head == "causal" else [self.model.head]
        words += [f"{name}-{value}" for name, value in self.options]
        return "_".join(words).replace("=", "")

    @property
    def is_critic(self) -> bool:
        """Whether it computes values."""
        return self.model.head == "value"

    @property
    def output(self) -> str:
        """Name of what it computes of tokens."""
        return "values" if self.is_critic else "logprobs"

    @property
    def spec(self) -> DeploymentSpec:
        """What a worker of it is started with."""
        return DeploymentSpec(
            model=self.model,
            kind="train",
            backend=self.backend,
            workers=self.layout.world_size,
            parallelism=self.layout,
            **dict(self.options),
        )


WRITER = Case(backend="fsdp")
CRITIC_WRITER = Case(backend="fsdp", layout=Parallelism(dp=2), model=CRITIC)
WRITERS = {case.model: case for case in (WRITER, CRITIC_WRITER)}
"""Every case of one of these models loads the checkpoint of this case; others only their own."""

CASES = (
    WRITER,
    CRITIC_WRITER,
    Case(backend="fsdp", model=CRITIC, is_slow=True),
    Case(backend="fsdp", layout=Parallelism(tp=2), model=CRITIC),
    Case(
        backend="fsdp",
        layout=Parallelism(dp=2, tp=2),
        model=CRITIC_LLAMA,
        options=(("optimizer", "host"), ("activation_checkpointing", True)),
        is_slow=True,
    ),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=CRITIC),
    Case(backend="megatron", layout=Parallelism(dp=2), model=CRITIC, is_slow=True),
    Case(backend="megatron", layout=Parallelism(tp=2), model=CRITIC),
    Case(backend="megatron", layout=Parallelism(tp=2, pp=2), model=CRITIC, is_slow=True),
    Case(backend="megatron", layout=Parallelism(cp=2), model=CRITIC_LLAMA, is_slow=True),
    Case(
        backend="megatron",
        layout=Parallelism(dp=2, ep=2),
        model=replace(QWEN3_MOE, head="value"),
        options=(("compute_dtype", "bfloat16"),),
        tolerance=0.05,
        is_slow=True,
    ),
    Case(backend="fsdp", layout=Parallelism(dp=2)),
    Case(backend="fsdp", layout=Parallelism(dp=2), options=(("optimizer", "host"),)),
    Case(backend="deepspeed", is_slow=True),
    Case(backend="deepspeed", layout=Parallelism(dp=2)),
    Case(
        backend="deepspeed",
        layout=Parallelism(dp=2),
        options=(("compute_dtype", "bfloat16"), ("activation_checkpointing", True)),
        tolerance=0.03,
        is_slow=True,
    ),
    Case(backend="deepspeed", layout=Parallelism(dp=3), model=LLAMA, is_slow=True),
    Case(
        backend="deepspeed",
        layout=Parallelism(dp=2),
        options=(("optimizer", "host"),),
        compiles=True,
    ),
    Case(
        backend="megatron",
        layout=Parallelism(dp=2),
        options=(
            ("compute_dtype", "bfloat16"),
            ("optimizer", "host"),
            ("activation_checkpointing", True),
        ),
        tolerance=0.05,
    ),
    Case(
        backend="megatron",
        layout=Parallelism(dp=2, ep=2),
        model=QWEN3_MOE,
        options=(("compute_dtype", "bfloat16"),),
        tolerance=0.05,
        is_slow=True,
    ),
    Case(
        backend="megatron",
        layout=Parallelism(tp=2, pp=2),
        options=(("compute_dtype", "bfloat16"),),
        tolerance=0.05,
        is_slow=True,
    ),
    Case(
        backend="megatron",
        layout=Parallelism(dp=2, cp=2, ep=2),
        model=QWEN3_MOE,
        options=(("optimizer", "host"),),
        is_slow=True,
    ),
    Case(backend="megatron", layout=Parallelism(tp=2)),
    Case(backend="megatron", layout=Parallelism(pp=2)),
    Case(backend="megatron", layout=Parallelism(cp=2), model=LLAMA),
    Case(backend="megatron", layout=Parallelism(dp=2, ep=2), model=QWEN3_MOE),
    Case(backend="megatron", layout=Parallelism(tp=2, ep=2), model=QWEN3_MOE),
    Case(backend="megatron", layout=Parallelism(tp=2, dp=2, ep=4), model=QWEN3_MOE, is_slow=True),
    Case(backend="megatron", layout=Parallelism(tp=2, cp=2), model=MIXTRAL, is_slow=True),
    Case(
        backend="megatron",
        layout=Parallelism(tp=2, dp=2, ep=2),
        model=QWEN3_MOE,
        options=(
            ("compute_dtype", "bfloat16"),
            ("optimizer", "host"),
            ("activation_checkpointing", True),
        ),
        tolerance=0.05,
        is_slow=True,
    ),
    # The layouts of PlexRL Table 1, with the size 2 for each axis that has one.
    Case(
        backend="megatron",
        layout=Parallelism(tp=2, ep=2, cp=2, dp=2),
        model=QWEN3_MOE,
        is_slow=True,
    ),
    Case(
        backend="megatron",
        layout=Parallelism(tp=2, ep=2, cp=2, pp=2),
        model=QWEN3_MOE,
        is_slow=True,
    ),
    Case(backend="megatron", layout=Parallelism(pp=2), model=THREE_LAYERS, is_slow=True),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=QWEN3_MOE),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=MIXTRAL, is_slow=True),
    Case(
        backend="fsdp",
        layout=Parallelism(dp=2),
        model=QWEN3_MOE,
        options=(("compute_dtype", "bfloat16"), ("activation_checkpointing", True)),
        is_slow=True,
        tolerance=0.03,
    ),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=GEMMA3),
    Case(backend="fsdp", layout=Parallelism(tp=2), model=GEMMA3, is_slow=True),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=GEMMA3, is_slow=True),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=GLM4, is_slow=True),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=PHI3),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=GPT_OSS),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=GPT_OSS, is_slow=True),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=QWEN3_5),
    Case(backend="fsdp", layout=Parallelism(dp=2), model=QWEN3_5_MOE, is_slow=True),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=QWEN3_5, is_slow=True),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=QWEN3_5_MOE, is_slow=True),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=GLM4, is_slow=True),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=PHI3, is_slow=True),
    Case(backend="deepspeed", layout=Parallelism(dp=2), model=QWEN3_MOE, is_slow=True),
    Case(backend="megatron", layout=Parallelism(dp=2), model=MIXTRAL, is_slow=True),
    Case(backend="megatron", layout=Parallelism(dp=2), is_slow=True),
    Case(backend="megatron", layout=Parallelism(tp=2), model=QWEN3, is_slow=True),
    Case(backend="megatron", layout=Parallelism(tp=2, cp=2), is_slow=True),
    Case(
        backend="megatron",
        layout=Parallelism(dp=2, cp=2, ep=2),
        model=QWEN3_MOE,
        options=(("activation_checkpointing", True),),
        is_slow=True,
    ),
    Case(
        backend="megatron",
        layout=Parallelism(tp=2, pp=2),
        options=(("activation_checkpointing", True),),
        is_slow=True,
    ),
    Case(backend="megatron", layout=Parallelism(dp=2, tp=2), model=LLAMA, is_slow=True),
    Case(backend="fsdp", layout=Parallelism(tp=2)),
    Case(backend="fsdp", layout=Parallelism(dp=2, tp=2), model=QWEN3, is_slow=True),
    Case(
        backend="fsdp",
        layout=Parallelism(dp=2),
        model=QWEN3,
        options=(("compute_dtype", "bfloat16"), ("activation_checkpointing", True)),
        tolerance=0.03,
    ),
    Case(backend="fsdp", layout=Parallelism(dp=2, tp=2), model=LLAMA, is_slow=True),
    Case(
        backend="fsdp",
        layout=Parallelism(tp=2),
        model=LLAMA,
        is_slow=True,
        options=(("compute_dtype", "bfloat16"), ("activation_checkpointing", True)),
        tolerance=0.03,
    ),
    Case(backend="fsdp", layout=Parallelism(dp=3), model=NARROW, is_slow=True),
    Case(backend="fsdp", layout=Parallelism(tp=2), model=BIASED, is_slow=True),
    Case(
        backend="fsdp",
        layout=Parallelism(dp=2, tp=2),
        options=(("optimizer", "host"), ("activation_checkpointing", True)),
        is_slow=True,
    ),
)
