"""The part of each parameter that a tensor-parallel rank holds, by the parameter's canonical name.

Megatron's split: projections into heads and into the MLP are split by rows, projections back by
columns, so that a block needs one all-reduce after attention and one after the MLP. The vocabulary
is split by rows, attention's sinks by heads. Each rank has whole experts, some of every layer's,
because a part of an expert's joint gate and up projection would be two boxes. Every rank has all
norms and routers.
"""

from dataclasses import replace

from plexrl.errors import InvalidRequestError
from plexrl.worker.state.arena_tensors import ShardBox, whole_box

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
SINKS = "sinks"
EXPERTS = "experts"
VOCABULARY = ("embed_tokens", "lm_head")


def box_of(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> ShardBox:
    """The box of parameter `name` that `rank` of `ranks` holds. The boxes of all ranks partition
    the tensor, or each is the whole tensor.

    Raises:
        InvalidRequestError: a projection, or a layer's experts, cannot be divided into `ranks`
            equal parts.
    """
    module = name.split(".")[-2] if "." in name else name
    whole = whole_box(shape)
    if ranks == 1:
        return whole
    if module in VOCABULARY:
        # The last rank's part may be smaller, or empty.
        part = -(-shape[0] // ranks)
        first = min(rank * part, shape[0])
        extent = min(part, shape[0] - first)
        return replace(whole, offset=(first, *whole.offset[1:]), shape=(extent, *shape[1:]))
    if module in BY_ROWS or module == EXPERTS or name.endswith(f".{SINKS}"):
        axis = 0
    elif module in BY_COLUMNS and len(shape) > 1:
        axis = 1
    else:
        return whole
    if shape[axis] % ranks:
        kind = EXPERTS if module == EXPERTS else "columns" if axis else "rows"
        raise InvalidRequestError(
            f"{name} has {shape[axis]} {kind}, which {ranks} tensor-"
            "parallel ranks cannot divide equally: choose another number of workers"
        )
    part = shape[axis] // ranks
    offset, extents = [0] * len(shape), list(shape)
    offset[axis], extents[axis] = rank * part, part
    return replace(whole, offset=tuple(offset), shape=tuple(extents))
