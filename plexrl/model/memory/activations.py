"""An estimate of one rank's activations, until a profile has measured them. Pure.

Per token and layer a backward needs the input and output of each operator (Korthikanti et al.
2022, §4, without attention scores, which flash and SDPA kernels do not keep): the residual before
and the output of both norms, queries, keys, values and the attention's output, and gate, up,
activation and product of the MLP, or of each of the token's experts. With checkpointing only a
layer's input is kept, and one layer is recomputed at a time. Logits are counted three times: as
computed, and in float32 with their gradient.
"""

from typing import Final

from plexrl.model.architecture.dimensions import Dimensions
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.memory.kv_cache import GATHERED_BYTES_MAX
from plexrl.model.spec import WEIGHT_BYTES
from plexrl.wire.operations import MICRO_BATCH_TOKENS

FLOAT32: Final = 4


def activation_bytes(spec: DeploymentSpec) -> int:
    """Peak of activations and logits, for micro-batches of the default size."""
    sizes, layout = spec.model.dimensions, spec.layout
    # Other heads compute one number of a token, or of a row.
    vocabulary = -(-sizes.vocabulary // layout.tp) if spec.model.head == "causal" else 1
    if spec.kind == "rollout":
        # One layer at a time: a prefill of one row, and the next token of every other.
        each = WEIGHT_BYTES[spec.dtype]
        tokens = spec.max_sequence_tokens + spec.max_concurrent_samples
        logits = spec.max_concurrent_samples * sizes.vocabulary * FLOAT32
        return tokens * layer_elements(sizes, layout.tp) * each + logits
    tokens = -(-max(MICRO_BATCH_TOKENS, spec.max_sequence_tokens) // layout.cp)
    if spec.kind == "forward":
        each = WEIGHT_BYTES[spec.dtype]
        logits = vocabulary * (each + FLOAT32)
        return tokens * (layer_elements(sizes, layout.tp) * each + logits)
    each = WEIGHT_BYTES[spec.compute_dtype]
    layers = -(-sizes.layers // layout.pp)
    of_layer = layer_elements(sizes, layout.tp)
    kept = layers * of_layer
    if spec.activation_checkpointing:
        kept = layers * sizes.hidden + of_layer
    return tokens * (kept * each + vocabulary * (each + 2 * FLOAT32))


def graph_bytes(spec: DeploymentSpec) -> int:
    """Activations of captured decode steps, which stay for the next replay: the keys and values
    that a layer gathers, one layer, and logits, with memory of their own for each number of rows.
    Rows are padded to powers of two. With `tp_sizes` each size has its own."""
    if spec.kind != "rollout" or spec.backend != "torch" or not spec.cuda_graphs:
        return 0
    sizes, each = spec.model.dimensions, WEIGHT_BYTES[spec.dtype]
    found = 0
    for tp in spec.tp_sizes or (spec.layout.tp,):
        rows = 1 << (spec.max_concurrent_samples - 1).bit_length()
        context = rows * spec.max_sequence_tokens * 2 * -(-sizes.kv_heads // tp) * sizes.head_dim
        layer = rows * layer_elements(sizes, tp)
        logits = 3 * rows * sizes.vocabulary
        found += min(GATHERED_BYTES_MAX, context * each) + (layer + logits) * each
    return found


def layer_elements(sizes: Dimensions, tp: int) -> int:
    """Values that one layer keeps for each token on a tensor rank."""
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    mlp = 4 * sizes.mlp * max(1, sizes.experts_per_token)
    return 4 * sizes.hidden + (attention + mlp) // tp
