"""Specification of a deployment's model, without torch.

A spec names an architecture of Hugging Face `transformers` with its configuration, or a model
directory. The parameter count follows from the configuration, so PlexRL can check whether a
deployment fits before it starts a process.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from plexrl.errors import InvalidRequestError, UnsupportedModelError
from plexrl.limits import check_numbers
from plexrl.model.architecture.dimensions import (
    Dimensions,
    LinearAttention,
    dimensions,
)
from plexrl.model.architecture.families import ARCHITECTURES
from plexrl.model.text.tokenizer import check_vocabulary
from plexrl.storage.model_folder import model_folder

TRAIN_BYTES_PER_PARAMETER = 16
"""fp32 parameter, gradient and the two AdamW moments."""

Head = Literal["causal", "reward", "value"]
"""Output layer of a model, see `ModelSpec.head`."""

VALUE_HEAD = "score.weight"
"""Canonical name of the parameter of a value head, `[1, hidden]`."""

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes per parameter of weights without optimizer state, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model. Either `path`, or `architecture` with `config`, `vocabulary` and `seed`."""

    path: str | None = None
    """A Hugging Face model directory (`config.json`, `*.safetensors`, `tokenizer.json`) that the
    cluster's nodes can read, or the URL of a checkpoint of this cluster."""
    architecture: str | None = None
    """A causal language model of `transformers`, by model type: `qwen2`, `llama`, …"""
    config_json: str = "{}"
    """Keyword arguments of the architecture's configuration class, as a JSON object."""
    vocabulary: str = ""
    """Characters of a generated model's character-level tokenizer, one token each, after the
    special tokens `<pad>` (0), `<bos>` (1) and `<eos>` (2)."""
    seed: int = 0
    """Seed of a generated model's initial weights: same seed, same bits."""
    head: Head = "causal"
    """Output layer: the language model's head, or one row (`score.weight`), as in
    `…ForSequenceClassification` of `transformers` with one label. That row computes a score from
    the last hidden state of a row of tokens (`reward`), or a value from each (`value`, a critic).
    For a critic `path` may be a language model, which has no such row: then it begins with zeros.
    """

    def __repr__(self) -> str:
        if self.path is not None:
            return f"ModelSpec(path={self.path!r}, head={self.head!r})"
        return (
            f"ModelSpec(architecture={self.architecture!r}, vocabulary of {len(self.vocabulary)}, "
            f"seed={self.seed}, head={self.head!r})"
        )

    @property
    def config(self) -> dict[str, Any]:
        """The architecture's configuration; with `path`, from `config.json` there.

        Raises:
            InvalidRequestError: the configuration cannot be read.
        """
        try:
            if self.path is not None:
                text = (model_folder(self.path, weights=False) / "config.json").read_text()
                return msgspec.json.decode(text, type=dict[str, Any])
            return msgspec.json.decode(self.config_json, type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequestError(
                f"the model's configuration cannot be read: {error}; `path` must be a Hugging Face "
                "directory on the nodes, with config.json and weights"
            ) from error

    @property
    def model_type(self) -> str | None:
        """The architecture; with `path`, from the configuration. Raises as `config`."""
        found: str | None = self.config.get("model_type", self.architecture)
        return found

    @property
    def dimensions(self) -> Dimensions:
        """The model's sizes. Raises `InvalidRequestError` if one is missing, and as `config`."""
        return dimensions({"model_type": self.architecture, **self.config})


def tiny_qwen2(
    vocabulary: str,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    head: Head = "causal",
) -> ModelSpec:
    """A small, generated, character-level Qwen2 of about 50 000·(hidden/64)²·layers parameters.

    `vocabulary` lists its characters; each is one token, after the three special tokens. `seed`
    determines the initial weights: same seed, same bits. `hidden` is the hidden size, a multiple of
    8; `layers` is the number of decoder layers. `head` is `causal` for a language model, `reward`
    for a model that scores rows, and `value` for a critic.

    Two layers of hidden size 64 learn to sort five digits on one CPU core in about a minute.

    Raises:
        InvalidRequestError: `vocabulary` has a character twice, or a size is invalid.
    """
    check_vocabulary(vocabulary)
    check_numbers("model", {"seed": seed, "hidden": hidden, "layers": layers})
    if hidden % 8:
        raise InvalidRequestError(
            f"hidden is {hidden}; it must be a multiple of 8", parameter="hidden"
        )
    config = {
        "vocab_size": len(vocabulary) + 3,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return ModelSpec(
        architecture="qwen2",
        config_json=msgspec.json.encode(config).decode(),
        vocabulary=vocabulary,
        seed=seed,
        head=head,
    )


def parameter_count(spec: ModelSpec) -> int:
    """Number of parameters of a decoder of one of the families. The number is exact.

    Raises:
        UnsupportedModelError: another architecture.
        InvalidRequestError: a size is missing in the configuration.
    """
    architecture = spec.model_type
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported: use one of "
            f"{', '.join(ARCHITECTURES)}",
            architecture=architecture,
            supported=list(ARCHITECTURES),
        )
    sizes = spec.dimensions
    hidden = sizes.hidden
    mlp = 3 * hidden * sizes.mlp * max(1, sizes.experts) + hidden * sizes.experts
    if sizes.has_mlp_bias:
        mlp += 2 * sizes.mlp + hidden
    if sizes.has_expert_biases:
        mlp += sizes.experts * (1 + 2 * sizes.mlp + hidden)
    if sizes.shared_expert:
        mlp += 3 * hidden * sizes.shared_expert + hidden
    mixing = sizes.attention_layers * _attention_parameters(sizes)
    if sizes.linear is not None:
        mixing += sizes.linear.layers * _linear_parameters(sizes.linear, hidden)
    per_layer = mlp + sizes.layer_norms * hidden
    embedding = sizes.vocabulary * hidden
    ends = hidden + embedding + output_parameters(sizes, spec.head)
    return sizes.layers * per_layer + mixing + ends


def _attention_parameters(sizes: Dimensions) -> int:
    """Parameters of one layer's attention."""
    hidden, heads, kv_heads, head_dim = sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim
    query_heads = heads * (2 if sizes.gates_attention else 1)
    attention = hidden * head_dim * (heads + query_heads + 2 * kv_heads)
    if sizes.has_qkv_bias:
        attention += head_dim * (query_heads + 2 * kv_heads)
    if sizes.has_output_bias:
        attention += hidden
    if sizes.has_qk_norm:
        attention += 2 * head_dim
    if sizes.has_sinks:
        attention += heads
    return attention


def _linear_parameters(linear: LinearAttention, hidden: int) -> int:
    """Parameters of one layer's linear attention: projections of queries, keys, values, output
    gate, decay and update rate, the convolution, two numbers of a head, norm and output."""
    joint = 2 * linear.keys + linear.values
    inputs = hidden * (joint + linear.values + 2 * linear.value_heads)
    own = joint * linear.kernel + 2 * linear.value_heads + linear.value_head_dim
    return inputs + own + linear.values * hidden


def output_parameters(sizes: Dimensions, head: Head) -> int:
    """Parameters of the output layer, without those that it shares with the embedding."""
    if head != "causal":
        return sizes.hidden
    return 0 if sizes.is_tied else sizes.vocabulary * sizes.hidden
