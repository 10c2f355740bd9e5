"""Names of tensors in published model files, where `transformers` has other parameters. Pure.

`transformers` 5 keeps all experts of a layer in two parameters. Published files, and other programs
that read them (vLLM, SGLang, `transformers` 4), have three matrices for each expert. Expert by
expert, gate, up and down, the bytes are the same, so a file needs other names only:

    mlp.experts.gate_up_proj [E, 2·M, X]   mlp.experts.0.gate_proj.weight [M, X], .up_proj, .1. …
    mlp.experts.down_proj    [E, X, M]     mlp.experts.0.down_proj.weight [X, M], .1. …
"""

Named = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor in a file."""

BLOCKS = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_5_moe_text": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
"""By model type: names of the layer's block and of an expert's gate, up and down projections."""


def published_tensors(model_type: str, name: str, shape: tuple[int, ...]) -> tuple[Named, ...]:
    """The tensors of published files whose bytes, end to end, are those of parameter `name`."""
    layer, found, rest = name.rpartition(".mlp.")
    if not found or model_type not in BLOCKS:
        return ((name, shape),)
    block, gate, up, down = BLOCKS[model_type]
    if rest == "gate.weight":
        return ((f"{layer}.{block}.gate.weight", shape),)
    matrices: tuple[str, ...]
    own: tuple[int, ...]
    match rest:
        case "experts.gate_up_proj":
            matrices, own = (gate, up), (shape[1] // 2, shape[2])
        case "experts.down_proj":
            matrices, own = (down,), shape[1:]
        case _:
            return ((name, shape),)
    return tuple(
        (f"{layer}.{block}.experts.{expert}.{matrix}.weight", own)
        for expert in range(shape[0])
        for matrix in matrices
    )
