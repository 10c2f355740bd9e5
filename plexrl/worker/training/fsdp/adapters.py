"""Linear layers with low-rank adapters, which are trained while the layers' weights are frozen.

Shapes: B rows, L tokens, X inputs, Y outputs of a layer, K the adapters' rank.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from plexrl.model.lora import LoraSpec, adapter_names

A_NAME, B_NAME = ".lora_A", ".lora_B"


class AdaptedLinear(nn.Linear):
    """A linear layer with a frozen weight and an adapter. It takes over the parameters of an
    existing layer, under the same names."""

    def __init__(self, linear: nn.Linear, lora: LoraSpec, generator: torch.Generator) -> None:
        # The parent's constructor would initialise a weight that is not needed.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._scale = lora.scale
        down_KX = torch.empty(lora.rank, linear.in_features)
        # Initialised as in PEFT and torch's linear layers: uniform within 1 / √inputs.
        nn.init.kaiming_uniform_(down_KX, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(down_KX)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, lora.rank))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's own name
        """`[B, L, X]` to `[B, L, Y]`."""
        inner_BLK = F.linear(input, self.lora_A)
        adapted_BLY = F.linear(inner_BLK, self.lora_B)
        return F.linear(input, self.weight, self.bias) + self._scale * adapted_BLY


def add_adapters(model: nn.Module, lora: LoraSpec) -> None:
    """Freeze all parameters and add adapters to the target layers; same spec, same bits."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(lora.seed)
    wanted = set(lora.targets)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in wanted and isinstance(child, nn.Linear):
                setattr(module, name, AdaptedLinear(child, lora, generator))


def state_name(parameter: str) -> str:
    """Name of a trained parameter in states and files: PEFT's name for adapters."""
    if parameter.endswith(A_NAME):
        return adapter_names(parameter.removesuffix(A_NAME))[0]
    if parameter.endswith(B_NAME):
        return adapter_names(parameter.removesuffix(B_NAME))[1]
    return parameter
