"""Checks of the types of SDK arguments, before anything is sent.

Without them a wrong type would end in an `AttributeError` deep inside the SDK, which mentions
neither the argument nor the correct type.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from numbers import Integral, Real
from typing import Any

from plexrl.errors import BatchShapeError, InvalidRequestError, LayoutError
from plexrl.limits import LIMITS, check_numbers
from plexrl.model.lora import LoraSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec
from plexrl.wire.parameter_checks import short


def check_batch(batch: object) -> None:
    """Raises `BatchShapeError` if `batch` is not a `Batch`, or has a row without tokens."""
    from plexrl.client.data.batch import Batch

    if not isinstance(batch, Batch):
        raise BatchShapeError(
            f"the batch is {short(batch)}: give a plexrl.Batch, made by plexrl.Batch(rows, "
            "{'mask': …}), Batch.from_completions(…) or Batch.from_samples(…)"
        )
    if 0 in batch.lengths:
        row = batch.lengths.index(0)
        raise BatchShapeError(f"row {row} has 0 tokens: every row needs one", row=row)


def source_deployment(source: object) -> str:
    """The id of the train deployment `source`.

    Raises:
        InvalidRequestError: `source` is not a deployment.
    """
    found = getattr(source, "deployment", None)
    if isinstance(found, str) and not isinstance(source, str):
        return found
    raise InvalidRequestError(
        f"the source of weights is {short(source)}: give the train deployment itself, as "
        "job.train_deployment(…) returned it",
        parameter="source",
    )


def check_model(model: object) -> None:
    """Raises `InvalidRequestError` if `model` is not a `ModelSpec`."""
    if not isinstance(model, ModelSpec):
        raise InvalidRequestError(
            f"the model is {short(model)}: give a plexrl.ModelSpec(path='/models/…'), a Hugging "
            "Face directory on the nodes, or plexrl.tiny_qwen2(…)",
            parameter="model",
        )
    check_numbers("model", {"seed": model.seed})


def check_lora(lora: LoraSpec) -> None:
    """Raises `InvalidRequestError` if a number of `lora` is out of bounds."""
    for name, bounds in LIMITS["lora"].items():
        bounds.check(f"lora.{name}", getattr(lora, name))


def with_reward_head(model: ModelSpec) -> ModelSpec:
    """`model` with a head that scores rows. Raises as `check_model`."""
    check_model(model)
    return replace(model, head="reward")


def checked_layout(options: Mapping[str, Any]) -> dict[str, object]:
    """The layout, its group sizes and the adapters of a deployment's options, as JSON values.

    Raises:
        LayoutError: the layout is not a `Parallelism`, or `tp_sizes` are no sizes.
        InvalidRequestError: the adapters are not a `LoraSpec`.
    """
    found: dict[str, object] = {}
    layout, lora = options.get("parallelism"), options.get("lora")
    if layout is not None:
        if not isinstance(layout, Parallelism):
            raise LayoutError(
                f"parallelism is {short(layout)}: give a plexrl.Parallelism(dp=2), or "
                "plexrl.Parallelism.from_text('dp=2')",
                field="parallelism",
            )
        found["parallelism"] = asdict(layout)
    if "tp_sizes" in options:
        sizes = options["tp_sizes"]
        size = LIMITS["deployment"]["tp_sizes"]
        if not isinstance(sizes, (list, tuple)) or not all(map(size.holds, sizes)):
            raise LayoutError(
                f"tp_sizes is {short(sizes)}: give sizes of groups, such as (1, 2, 4)",
                field="tp_sizes",
            )
        found["tp_sizes"] = list(sizes)
    if lora is not None:
        if not isinstance(lora, LoraSpec):
            raise InvalidRequestError(
                f"lora is {short(lora)}: give a plexrl.LoraSpec(rank=8)", parameter="lora"
            )
        check_lora(lora)
        found["lora"] = asdict(lora)
    return found


def plain_value(value: object) -> bool | int | float:
    """Convert a numpy number, which messages cannot hold, to a Python number.

    Raises:
        InvalidRequestError: `value` is not a number.
    """
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise InvalidRequestError(f"{short(value)} cannot be sent: give a number, a string or a bool")
