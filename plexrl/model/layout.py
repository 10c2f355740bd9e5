"""Checks whether tensor parallelism can cut a model. Pure.

The router checks this before a worker starts.
"""

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec


def check_tensor_parallel(model: ModelSpec, layout: Parallelism) -> None:
    """Check that every tensor rank gets whole heads, a part of the MLP and of the vocabulary.

    Raises:
        LayoutError: `tp` does not divide the query or key-value heads, or a rank would get no part
            of the MLP or of the vocabulary.
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
        raise InvalidRequestError(
            f"the model's configuration lacks a size: {error}; add it to config.json"
        ) from error
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % layout.tp:
            raise LayoutError(
                f"parallelism.tp is {layout.tp} and the model's {name} is {count}: tp must divide "
                f"the number of heads; use {_best(layout.tp, heads, kv_heads)} and a larger size "
                "of another axis",
                field="tp",
            )
    for name, size in parted.items():
        # All parts have equal size, except a smaller last one.
        if -(-size // layout.tp) * (layout.tp - 1) >= size:
            raise LayoutError(
                f"parallelism.tp is {layout.tp} and the model's {name} is {size}: the last rank "
                "would get no part of it; lower tp",
                field="tp",
            )


def check_equal_parts(model: ModelSpec, layout: Parallelism) -> None:
    """Check that all tensor ranks of an engine get equal shapes. After `check_tensor_parallel`.

    Raises:
        LayoutError: `tp` does not divide the MLP's columns.
    """
    columns = int(model.config["intermediate_size"])
    if columns % layout.tp:
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and the model's intermediate_size is {columns}: the "
            "ranks of a rollout have parts of equal size; choose a tp that divides it",
            field="tp",
        )


def _best(requested: int, heads: int, kv_heads: int) -> int:
    """The largest valid `tp` up to `requested`."""
    return max(n for n in range(1, requested + 1) if heads % n == 0 and kv_heads % n == 0)
