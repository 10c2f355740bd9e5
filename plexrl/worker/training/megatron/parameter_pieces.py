"""The boxes of Hugging Face parameters that make up each parameter of a Megatron rank. Pure.

    embedding.word_embeddings.weight   model.embed_tokens, its rows padded to a multiple of tp
    self_attention.linear_qkv          for each group of heads: its queries, its key, its value
    self_attention.linear_proj         o_proj, columns
    mlp.linear_fc1                     rows of gate_proj, rows of up_proj
    mlp.linear_fc2                     down_proj, columns
    mlp.experts.gate_up_EFH            gate_up_proj of this rank's experts
    mlp.experts.down_EHF               down_proj of this rank's experts
    output_layer.weight                lm_head, or model.embed_tokens if the two are tied, or the
                                       score of a reward or value head

Every tensor rank has whole norms, routers and scores. A tied embedding is on the first and on the
last stage, under the same name.

Megatron fuses and interleaves parameters that Hugging Face keeps apart, and its distributed
optimizer cuts the result at any element (`cut`). In local memory the result is still a sequence of
boxes of Hugging Face tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from plexrl.model.architecture.cut import stage_layers
from plexrl.model.architecture.dimensions import Dimensions
from plexrl.model.layout import padded_vocabulary
from plexrl.model.parallelism import Coordinates, Parallelism
from plexrl.model.spec import Head
from plexrl.worker.state.arena_tensors import ParameterPiece

Pieces = tuple[ParameterPiece, ...]


def pieces_by_parameter(
    sizes: Dimensions, layout: Parallelism, coordinates: Coordinates, head: Head
) -> dict[str, Pieces]:
    """The pieces of each parameter of this rank, by Megatron's name. The rest is padding. `head` is
    the model's (`ModelSpec.head`)."""
    found: dict[str, Pieces] = {}
    is_first, is_last = coordinates.pp == 0, coordinates.pp == layout.pp - 1
    embedding = "model.embed_tokens.weight"
    if is_first:
        found["embedding.word_embeddings.weight"] = _vocabulary_rows(
            embedding, sizes, layout, coordinates
        )
    for local, layer in enumerate(stage_layers(sizes.layers, layout.pp)[coordinates.pp]):
        names = f"model.layers.{layer}"
        for name, pieces in _layer_parameters(names, sizes, layout, coordinates):
            found[f"decoder.layers.{local}.{name}"] = pieces
    if is_last:
        found["decoder.final_layernorm.weight"] = _whole("model.norm.weight", sizes.hidden)
        if head != "causal":
            score = _rows("score.weight", (1, sizes.hidden), 0, 1, 0)
            found["output_layer.weight"] = (score,)
        elif not (sizes.is_tied and is_first):
            name = embedding if sizes.is_tied else "lm_head.weight"
            found["output_layer.weight"] = _vocabulary_rows(name, sizes, layout, coordinates)
    return found


def is_replicated(pieces: Pieces) -> bool:
    """Whether every tensor rank has the whole parameter."""
    return all(piece.shape == piece.global_shape for piece in pieces)


def cut(pieces: Sequence[ParameterPiece], first: int, last: int) -> list[ParameterPiece]:
    """Elements `first` to `last` of the local parameter, as the fewest boxes, in order.

    Their `start` still counts from the beginning of the local parameter.
    """
    found: list[ParameterPiece] = []
    for piece in pieces:
        begin = max(first - piece.start, 0)
        end = min(last - piece.start, piece.elements)
        for offset, shape, start in _boxes(piece.shape, begin, end):
            moved = tuple(a + b for a, b in zip(piece.offset, offset, strict=True))
            found.append(replace(piece, offset=moved, shape=shape, start=piece.start + start))
    return found


def _layer_parameters(
    names: str, sizes: Dimensions, layout: Parallelism, coordinates: Coordinates
) -> Iterator[tuple[str, Pieces]]:
    hidden = sizes.hidden
    attention = f"{names}.self_attn"
    yield "input_layernorm.weight", _whole(f"{names}.input_layernorm.weight", hidden)
    yield "self_attention.linear_qkv.weight", _qkv(attention, "weight", sizes, layout, coordinates)
    if sizes.has_qkv_bias:
        yield "self_attention.linear_qkv.bias", _qkv(attention, "bias", sizes, layout, coordinates)
    if sizes.has_qk_norm:
        for letter in "qk":
            whole = _whole(f"{attention}.{letter}_norm.weight", sizes.head_dim)
            yield f"self_attention.{letter}_layernorm.weight", whole
    columns = sizes.heads * sizes.head_dim
    yield (
        "self_attention.linear_proj.weight",
        (_columns(f"{attention}.o_proj.weight", (hidden, columns), layout.tp, coordinates.tp),),
    )
    yield "pre_mlp_layernorm.weight", _whole(f"{names}.post_attention_layernorm.weight", hidden)
    if sizes.experts:
        yield from _experts(f"{names}.mlp", sizes, layout, coordinates)
        return
    own = sizes.mlp // layout.tp
    shape = (sizes.mlp, hidden)
    gate = _rows(f"{names}.mlp.gate_proj.weight", shape, coordinates.tp * own, own, 0)
    up = _rows(f"{names}.mlp.up_proj.weight", shape, coordinates.tp * own, own, own * hidden)
    yield "mlp.linear_fc1.weight", (gate, up)
    down = _columns(f"{names}.mlp.down_proj.weight", (hidden, sizes.mlp), layout.tp, coordinates.tp)
    yield "mlp.linear_fc2.weight", (down,)


def _experts(
    names: str, sizes: Dimensions, layout: Parallelism, coordinates: Coordinates
) -> Iterator[tuple[str, Pieces]]:
    count, mlp, hidden = sizes.experts, sizes.mlp, sizes.hidden
    router = ParameterPiece(
        name=f"{names}.gate.weight",
        global_shape=(count, hidden),
        offset=(0, 0),
        shape=(count, hidden),
        start=0,
    )
    yield "mlp.router.weight", (router,)
    own = count // layout.ep
    for here, there, shape in (
        ("gate_up_EFH", "gate_up_proj", (2 * mlp, hidden)),
        ("down_EHF", "down_proj", (hidden, mlp)),
    ):
        piece = ParameterPiece(
            name=f"{names}.experts.{there}",
            global_shape=(count, *shape),
            offset=(coordinates.ep * own, 0, 0),
            shape=(own, *shape),
            start=0,
        )
        yield f"mlp.experts.{here}", (piece,)


def _qkv(
    attention: str, kind: str, sizes: Dimensions, layout: Parallelism, coordinates: Coordinates
) -> Pieces:
    """For each of this rank's groups of heads: its queries, its key, its value."""
    groups = sizes.kv_heads // layout.tp
    queries = sizes.heads // sizes.kv_heads * sizes.head_dim
    found: list[ParameterPiece] = []
    start = 0
    for group in range(coordinates.tp * groups, (coordinates.tp + 1) * groups):
        for letter, rows in (("q", queries), ("k", sizes.head_dim), ("v", sizes.head_dim)):
            shape: tuple[int, ...] = (rows * sizes.kv_heads,)
            if kind == "weight":
                shape = (*shape, sizes.hidden)
            piece = _rows(f"{attention}.{letter}_proj.{kind}", shape, group * rows, rows, start)
            found.append(piece)
            start += piece.elements
    return tuple(found)


def _vocabulary_rows(
    name: str, sizes: Dimensions, layout: Parallelism, coordinates: Coordinates
) -> Pieces:
    own = padded_vocabulary(sizes, layout) // layout.tp
    first = coordinates.tp * own
    rows = min(own, sizes.vocabulary - first)
    return (_rows(name, (sizes.vocabulary, sizes.hidden), first, rows, 0),) if rows > 0 else ()


def _whole(name: str, size: int) -> Pieces:
    return (ParameterPiece(name=name, global_shape=(size,), offset=(0,), shape=(size,), start=0),)


def _rows(name: str, shape: tuple[int, ...], first: int, rows: int, start: int) -> ParameterPiece:
    rest = shape[1:]
    return ParameterPiece(
        name=name,
        global_shape=shape,
        offset=(first, *(0 for _ in rest)),
        shape=(rows, *rest),
        start=start,
    )


def _columns(name: str, shape: tuple[int, int], parts: int, part: int) -> ParameterPiece:
    own = shape[1] // parts
    return ParameterPiece(
        name=name, global_shape=shape, offset=(0, part * own), shape=(shape[0], own), start=0
    )


def _boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(offset, shape, elements before it) of each box in a flat range of a tensor."""
    if first >= last:
        return
    if len(shape) == 1:
        yield (first,), (last - first,), first
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:
        yield from _row_boxes(shape, end, first, last)
        return
    yield from _row_boxes(shape, begin - 1, first, begin * row)
    if begin < end:
        rest = (0,) * (len(shape) - 1)
        yield (begin, *rest), (end - begin, *shape[1:]), begin * row
    yield from _row_boxes(shape, end, end * row, last)


def _row_boxes(
    shape: tuple[int, ...], index: int, first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    before = index * math.prod(shape[1:])
    for offset, box, start in _boxes(shape[1:], first - before, last - before):
        yield (index, *offset), (1, *box), before + start
