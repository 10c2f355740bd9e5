"""Builds models with `transformers`, from a `ModelSpec`."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.model.architecture.families import FAMILIES
from plexrl.model.spec import VALUE_HEAD, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def device_name(device: torch.device) -> str:
    """The name of the processor that computes on `device`: its times are those of no other
    processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()}, {threads} threads"


def build_model(spec: ModelSpec) -> "nn.Module":
    """The model of `spec`, with the head that it names: fp32, in evaluation mode, without dropout.

    The weights of a generated model depend on `spec.seed` alone: same spec, same bits. The global
    random state does not change.

    Raises:
        InvalidRequestError: `transformers` refuses the architecture or its configuration, or the
            model's directory lacks weights, or has a value head in place of the head of a language
            model.
    """
    with refusals_explained():
        if spec.path is None:
            return model_of_config(spec)
        labels, options = arguments(spec)
        model, found = automatic_class(spec).from_pretrained(
            spec.path, local_files_only=True, output_loading_info=True, **labels, **options
        )
        missing = set(found["missing_keys"])
        if spec.head == "value" and VALUE_HEAD in missing:
            missing.remove(VALUE_HEAD)
            torch.nn.init.zeros_(model.score.weight)
        refuse_value_head(spec, found["unexpected_keys"])
        _refuse_missing(spec.path, missing)
        return _prepared(model, spec)


def model_of_config(spec: ModelSpec) -> "nn.Module":
    """The model of `spec` with initial weights, whether or not it has files. Raises as
    `transformers`."""
    from transformers import AutoConfig

    labels, options = arguments(spec)
    if spec.path is None:
        config = AutoConfig.for_model(spec.architecture, **spec.config, **labels)
    else:
        config = AutoConfig.from_pretrained(spec.path, local_files_only=True, **labels)
    # transformers 5.10 would leave the files' dtype there.
    config.dtype = options["dtype"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = automatic_class(spec).from_config(config, **options)
    return _prepared(model, spec)


def _prepared(model: Any, spec: ModelSpec) -> "nn.Module":
    model.eval()
    if spec.head == "value":
        # `transformers` would keep the output of one token of a row only.
        model.forward = partial(_values, model)
    return model  # type: ignore[no-any-return]


def _values(model: Any, **inputs: Any) -> Any:
    """The outputs of a value head at every token `[B, L, 1]`, as `logits`."""
    from transformers.modeling_outputs import TokenClassifierOutput

    decoder = getattr(model, model.base_model_prefix)
    return TokenClassifierOutput(logits=model.score(decoder(**inputs).last_hidden_state))


def arguments(spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `transformers` for a model's configuration, and for the model."""
    labels: dict[str, Any] = {"num_labels": 1} if spec.head != "causal" else {}
    family = FAMILIES.get(str(spec.model_type))
    attention = "sdpa" if family is None else family.attention
    return labels, {"dtype": torch.float32, "attn_implementation": attention}


def automatic_class(spec: ModelSpec) -> Any:
    """The class of `transformers` that makes models with this head."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if spec.head == "causal" else AutoModelForSequenceClassification


@contextmanager
def refusals_explained() -> Iterator[None]:
    """Turn whatever `transformers` raises into an `InvalidRequestError`."""
    try:
        yield
    except (PlexRLError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # `transformers` checks little: a wrong configuration may fail anywhere in its code.
        raise InvalidRequestError(
            f"the model cannot be built ({type(error).__name__}: {error}): check its directory, or "
            "its architecture and configuration"
        ) from error


def _refuse_missing(path: str, missing: "Iterable[str]") -> None:
    """Refuse missing weights: `transformers` would initialise them at random, with only a log."""
    names = sorted(missing)
    if names:
        raise InvalidRequestError(
            f"{path} lacks {len(names)} of the model's weights ({', '.join(names[:3])}, …): check "
            "that the directory is complete, and that the model has this head"
        )


def refuse_value_head(spec: ModelSpec, names: "Iterable[str]") -> None:
    """Refuse to open a critic's or a reward model's directory, whose tensors have these names, as a
    language model. With tied embeddings nothing would be missing.

    Raises:
        InvalidRequestError: it has a value head, and `spec` asks for a language model's head.
    """
    if spec.head == "causal" and VALUE_HEAD in names:
        raise InvalidRequestError(
            f"{spec.path} is a critic or a reward model ({VALUE_HEAD}), not a language model: open "
            'it with head="value" or head="reward"'
        )


def named_parameters(model: "nn.Module") -> "list[tuple[str, nn.Parameter]]":
    """Parameters with their canonical names, in the model's order; a tied one only once."""
    return list(model.named_parameters(remove_duplicate=True))
