"""Models of `transformers`: whole, or laid out on `meta` and read box by box."""

from plexrl.worker.models.build import build_model, device_name, named_parameters
from plexrl.worker.models.laid_out import (
    LaidOutModel,
    lay_out_model,
    parameters_on_meta,
    whole_model,
)

__all__ = [
    "LaidOutModel",
    "build_model",
    "device_name",
    "lay_out_model",
    "named_parameters",
    "parameters_on_meta",
    "whole_model",
]
