"""Models as `transformers` builds them, from a `ModelSpec`."""

from typing import TYPE_CHECKING, Any

import torch

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.model.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def build_model(spec: ModelSpec) -> "nn.Module":
    """The model of `spec`, with the head it names: fp32, in evaluation mode, without dropout.

    A locally made model's weights depend on `spec.seed` alone: same spec, same bits. The global
    random state is left as it was.

    Raises:
        InvalidRequestError: `transformers` refuses the architecture or its configuration, or a
            directory lacks weights of it.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    labels: dict[str, Any] = {"num_labels": 1} if spec.head == "reward" else {}
    kind = AutoModelForSequenceClassification if spec.head == "reward" else AutoModelForCausalLM
    try:
        if spec.path is not None:
            model, found = kind.from_pretrained(
                spec.path, local_files_only=True, output_loading_info=True, **labels, **options
            )
            _refuse_missing(spec.path, found["missing_keys"])
        else:
            config = AutoConfig.for_model(spec.architecture, **spec.config, **labels)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.seed)
                model = kind.from_config(config, **options)
    except (PlexRLError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # A configuration that it does not check fails wherever its code first meets the value.
        raise InvalidRequestError(
            f"the model cannot be built ({type(error).__name__}: {error}): check its directory, or "
            "its architecture and configuration"
        ) from error
    model.eval()
    return model  # type: ignore[no-any-return]


def _refuse_missing(path: str, missing: "Iterable[str]") -> None:
    """`transformers` draws what it does not find at random, and says so in a log only."""
    names = sorted(missing)
    if names:
        raise InvalidRequestError(
            f"{path} lacks {len(names)} of the model's weights ({', '.join(names[:3])}, …): is it "
            "complete, and of a model with this head?"
        )


def named_parameters(model: "nn.Module") -> "list[tuple[str, nn.Parameter]]":
    """Parameters under their canonical names, a tied one once, in the model's own order."""
    return list(model.named_parameters(remove_duplicate=True))
