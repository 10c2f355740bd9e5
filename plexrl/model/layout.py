"""Whether a model can be cut as a layout says. Pure.

The router refuses by this before a worker is started.
"""

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec


def check_tensor_parallel(model: ModelSpec, layout: Parallelism) -> None:
    """Heads are dealt out whole; of the MLP and the vocabulary every rank needs a part.

    Raises:
        LayoutError: `tp` does not divide the query or key-value heads, or leaves a rank without
            words or without a part of the MLP.
        InvalidRequestError: the configuration lacks a size.
    """
    if layout.tp == 1:
        return
    config = model.config
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        parted = {name: int(config[name]) for name in ("intermediate_size", "vocab_size")}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"the model's configuration lacks a size: {error}") from error
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % layout.tp:
            raise LayoutError(
                f"parallelism.tp is {layout.tp} and the model's {name} is {count}: heads are not "
                f"cut, so tp must divide their number; use {_best(layout.tp, heads, kv_heads)} and "
                "more of another axis",
                field="tp",
            )
    for name, size in parted.items():
        # Parts are of equal size but for the last that is not empty.
        if -(-size // layout.tp) * (layout.tp - 1) >= size:
            raise LayoutError(
                f"parallelism.tp is {layout.tp} and the model's {name} is {size}: the last rank "
                "would have no part of it; lower tp",
                field="tp",
            )


def check_equal_parts(model: ModelSpec, layout: Parallelism) -> None:
    """For engines whose tensor ranks all compute the same shapes. After `check_tensor_parallel`.

    Raises:
        LayoutError: `tp` does not divide the MLP.
    """
    columns = int(model.config["intermediate_size"])
    if columns % layout.tp:
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and the model's intermediate_size is {columns}: a "
            "rollout's ranks have parts of equal size, so tp must divide it; choose another",
            field="tp",
        )


def _best(asked: int, heads: int, kv_heads: int) -> int:
    return max(n for n in range(1, asked + 1) if heads % n == 0 and kv_heads % n == 0)
