"""Models as `transformers` builds them, from a `ModelSpec`."""

from typing import TYPE_CHECKING, Any

import torch

from plexrl.errors import InvalidRequestError
from plexrl.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn


def build_model(spec: ModelSpec) -> "nn.Module":
    """The causal language model of `spec`: fp32, in evaluation mode, without dropout.

    A locally made model's weights depend on `spec.seed` alone: same spec, same bits. The global
    random state is left as it was.

    Raises:
        InvalidRequestError: `transformers` refuses the architecture or its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    try:
        if spec.path is not None:
            model = AutoModelForCausalLM.from_pretrained(
                spec.path, local_files_only=True, **options
            )
        else:
            config = AutoConfig.for_model(spec.architecture, **spec.config)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.seed)
                model = AutoModelForCausalLM.from_config(config, **options)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequestError(f"the model cannot be built: {error}") from error
    model.eval()
    return model  # type: ignore[no-any-return]


def named_parameters(model: "nn.Module") -> "list[tuple[str, nn.Parameter]]":
    """Parameters under their canonical names, a tied one once, in the model's own order."""
    return list(model.named_parameters(remove_duplicate=True))
