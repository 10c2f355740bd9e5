"""Whether a model's matrices can be shared out over tensor-parallel ranks. Pure."""

from plexrl.errors import LayoutError
from plexrl.model_spec import ModelSpec


def check_tensor_split(model: ModelSpec, ranks: int) -> None:
    """Raises `LayoutError` for heads or columns that so many ranks cannot share equally."""
    config = model.config
    heads = int(config["num_attention_heads"])
    for name, count in (
        ("attention heads", heads),
        ("heads of keys and values", int(config.get("num_key_value_heads") or heads)),
        ("columns of the MLP", int(config["intermediate_size"])),
    ):
        if count % ranks:
            raise LayoutError(
                f"parallelism.tp is {ranks} and the model has {count} {name}, which {ranks} ranks "
                "cannot share equally: choose a divisor",
                field="tp",
            )
