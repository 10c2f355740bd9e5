"""Which boxes of which Hugging Face parameters make up each parameter of a rank's model. Pure.

    embedding.word_embeddings.weight   model.embed_tokens, its rows padded to a multiple of tp
    self_attention.linear_qkv          of every group of heads its queries, its key, its value
    self_attention.linear_proj         o_proj, columns
    mlp.linear_fc1                     rows of gate_proj, rows of up_proj
    mlp.linear_fc2                     down_proj, columns
    mlp.experts.local_experts.N        of this rank's N-th expert, cut like a dense MLP
    output_layer.weight                lm_head, or model.embed_tokens where the two are tied

Norms and routers are whole on every tensor rank. A tied embedding is on the first and on the last
stage, under the same name.
"""

from collections.abc import Iterator

from plexrl.model.megatron_dimensions import Dimensions, padded_vocabulary
from plexrl.model.parallelism import Coordinates, Parallelism
from plexrl.worker.training.megatron.boxes import Piece

Pieces = tuple[Piece, ...]


def pieces_by_parameter(
    sizes: Dimensions, layout: Parallelism, place: Coordinates
) -> dict[str, Pieces]:
    """By Megatron's name on this rank. What no piece covers is padding."""
    found: dict[str, Pieces] = {}
    is_first, is_last = place.pp == 0, place.pp == layout.pp - 1
    embedding = "model.embed_tokens.weight"
    if is_first:
        found["embedding.word_embeddings.weight"] = _words(embedding, sizes, layout, place)
    of_stage = sizes.layers // layout.pp
    for local in range(of_stage):
        names = f"model.layers.{place.pp * of_stage + local}"
        for name, pieces in _of_layer(names, sizes, layout, place):
            found[f"decoder.layers.{local}.{name}"] = pieces
    if is_last:
        found["decoder.final_layernorm.weight"] = _whole("model.norm.weight", sizes.hidden)
        if not (sizes.is_tied and is_first):
            name = embedding if sizes.is_tied else "lm_head.weight"
            found["output_layer.weight"] = _words(name, sizes, layout, place)
    return found


def is_replicated(pieces: Pieces) -> bool:
    """Every tensor rank has the whole parameter."""
    return all(piece.shape == piece.global_shape for piece in pieces)


def _of_layer(
    names: str, sizes: Dimensions, layout: Parallelism, place: Coordinates
) -> Iterator[tuple[str, Pieces]]:
    hidden = sizes.hidden
    attention = f"{names}.self_attn"
    yield "input_layernorm.weight", _whole(f"{names}.input_layernorm.weight", hidden)
    yield "self_attention.linear_qkv.weight", _qkv(attention, "weight", sizes, layout, place)
    if sizes.has_qkv_bias:
        yield "self_attention.linear_qkv.bias", _qkv(attention, "bias", sizes, layout, place)
    if sizes.has_qk_norm:
        for letter in "qk":
            whole = _whole(f"{attention}.{letter}_norm.weight", sizes.head_dim)
            yield f"self_attention.{letter}_layernorm.weight", whole
    columns = sizes.heads * sizes.head_dim
    yield (
        "self_attention.linear_proj.weight",
        (_columns(f"{attention}.o_proj.weight", (hidden, columns), layout.tp, place.tp),),
    )
    yield "pre_mlp_layernorm.weight", _whole(f"{names}.post_attention_layernorm.weight", hidden)
    if sizes.experts:
        yield from _experts(f"{names}.mlp", sizes, layout, place)
        return
    own = sizes.mlp // layout.tp
    shape = (sizes.mlp, hidden)
    gate = _rows(f"{names}.mlp.gate_proj.weight", shape, place.tp * own, own, 0)
    up = _rows(f"{names}.mlp.up_proj.weight", shape, place.tp * own, own, own * hidden)
    yield "mlp.linear_fc1.weight", (gate, up)
    down = _columns(f"{names}.mlp.down_proj.weight", (hidden, sizes.mlp), layout.tp, place.tp)
    yield "mlp.linear_fc2.weight", (down,)


def _experts(
    names: str, sizes: Dimensions, layout: Parallelism, place: Coordinates
) -> Iterator[tuple[str, Pieces]]:
    count, mlp, hidden = sizes.experts, sizes.mlp, sizes.hidden
    router = Piece(
        name=f"{names}.gate.weight",
        global_shape=(count, hidden),
        offset=(0, 0),
        shape=(count, hidden),
        start=0,
    )
    yield "mlp.router.weight", (router,)
    of_rank, own = count // layout.ep, mlp // layout.tp
    for local in range(of_rank):
        expert = place.ep * of_rank + local
        fc1 = tuple(
            Piece(
                name=f"{names}.experts.gate_up_proj",
                global_shape=(count, 2 * mlp, hidden),
                offset=(expert, half * mlp + place.tp * own, 0),
                shape=(1, own, hidden),
                start=half * own * hidden,
            )
            for half in range(2)
        )
        fc2 = Piece(
            name=f"{names}.experts.down_proj",
            global_shape=(count, hidden, mlp),
            offset=(expert, 0, place.tp * own),
            shape=(1, hidden, own),
            start=0,
        )
        yield f"mlp.experts.local_experts.{local}.linear_fc1.weight", fc1
        yield f"mlp.experts.local_experts.{local}.linear_fc2.weight", (fc2,)


def _qkv(
    attention: str, kind: str, sizes: Dimensions, layout: Parallelism, place: Coordinates
) -> Pieces:
    """Of this rank's groups: the queries of a group, its key, its value; then the next group."""
    groups = sizes.kv_heads // layout.tp
    queries = sizes.heads // sizes.kv_heads * sizes.head_dim
    found: list[Piece] = []
    start = 0
    for group in range(place.tp * groups, (place.tp + 1) * groups):
        for letter, rows in (("q", queries), ("k", sizes.head_dim), ("v", sizes.head_dim)):
            shape: tuple[int, ...] = (rows * sizes.kv_heads,)
            if kind == "weight":
                shape = (*shape, sizes.hidden)
            piece = _rows(f"{attention}.{letter}_proj.{kind}", shape, group * rows, rows, start)
            found.append(piece)
            start += piece.elements
    return tuple(found)


def _words(name: str, sizes: Dimensions, layout: Parallelism, place: Coordinates) -> Pieces:
    own = padded_vocabulary(sizes, layout) // layout.tp
    first = place.tp * own
    rows = min(own, sizes.vocabulary - first)
    return (_rows(name, (sizes.vocabulary, sizes.hidden), first, rows, 0),) if rows > 0 else ()


def _whole(name: str, size: int) -> Pieces:
    return (Piece(name=name, global_shape=(size,), offset=(0,), shape=(size,), start=0),)


def _rows(name: str, shape: tuple[int, ...], first: int, rows: int, start: int) -> Piece:
    rest = shape[1:]
    return Piece(
        name=name,
        global_shape=shape,
        offset=(first, *(0 for _ in rest)),
        shape=(rows, *rest),
        start=start,
    )


def _columns(name: str, shape: tuple[int, int], parts: int, part: int) -> Piece:
    own = shape[1] // parts
    return Piece(
        name=name, global_shape=shape, offset=(0, part * own), shape=(shape[0], own), start=0
    )
