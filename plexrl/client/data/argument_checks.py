"""What a controller hands to the SDK by mistake, refused before anything is sent.

A mistake that only the type of an argument shows would otherwise end in an `AttributeError` deep
inside, which names neither the argument nor what to write instead.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from numbers import Integral, Real
from typing import Any

from plexrl.errors import BatchShapeError, InvalidRequestError, LayoutError
from plexrl.model.lora import LoraSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec
from plexrl.wire.parameter_checks import short

Plain = dict[str, Any]


def check_batch(batch: object) -> None:
    """Raises `BatchShapeError` for what is no `Batch`, and for one with a row without tokens."""
    from plexrl.client.data.batch import Batch

    if not isinstance(batch, Batch):
        raise BatchShapeError(
            f"the batch is {short(batch)}: make a plexrl.Batch of it, as plexrl.Batch(rows, "
            "{'mask': …}), Batch.from_completions(…) or Batch.from_samples(…)"
        )
    if 0 in batch.lengths:
        row = batch.lengths.index(0)
        raise BatchShapeError(f"row {row} has 0 tokens: every row needs one", row=row)


def name_of_source(source: object) -> str:
    """The id of a train deployment that weights are to come from.

    Raises:
        InvalidRequestError: it is no deployment.
    """
    found = getattr(source, "deployment", None)
    if isinstance(found, str) and not isinstance(source, str):
        return found
    raise InvalidRequestError(
        f"the source of weights is {short(source)}: give the train deployment itself, what "
        "job.train_deployment(…) returned",
        parameter="source",
    )


def check_model(model: object) -> None:
    """Raises `InvalidRequestError` for what is no model."""
    if not isinstance(model, ModelSpec):
        raise InvalidRequestError(
            f"the model is {short(model)}: give a plexrl.ModelSpec(path='/models/…'), a Hugging "
            "Face directory on the nodes, or plexrl.tiny_qwen2(…)",
            parameter="model",
        )


def scoring(model: ModelSpec) -> ModelSpec:
    """`model` with a head that scores rows. Raises as `check_model`."""
    check_model(model)
    return replace(model, head="reward")


def checked_layout(options: Mapping[str, Any]) -> Plain:
    """Of a deployment's options the layout and the adapters, as they travel.

    Raises:
        LayoutError: the layout is no `Parallelism`.
        InvalidRequestError: the adapters are no `LoraSpec`.
    """
    found: Plain = {}
    layout, lora = options.get("parallelism"), options.get("lora")
    if layout is not None:
        if not isinstance(layout, Parallelism):
            raise LayoutError(
                f"parallelism is {short(layout)}: give a plexrl.Parallelism(dp=2), or "
                "plexrl.Parallelism.from_text('dp=2')",
                field="parallelism",
            )
        found["parallelism"] = asdict(layout)
    if lora is not None:
        if not isinstance(lora, LoraSpec):
            raise InvalidRequestError(
                f"lora is {short(lora)}: give a plexrl.LoraSpec(rank=8)", parameter="lora"
            )
        found["lora"] = asdict(lora)
    return found


def plain_value(value: object) -> bool | int | float:
    """For values that messages cannot hold: numbers of numpy as those of Python.

    Raises:
        InvalidRequestError: it is no number.
    """
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise InvalidRequestError(f"{short(value)} is no plain value: give a number, a text or a bool")
