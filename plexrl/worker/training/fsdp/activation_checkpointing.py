"""Activations of layers computed again in the backward pass instead of kept."""

import functools
from collections.abc import Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(layers: Iterable[nn.Module]) -> None:
    """Have each layer keep only its input, in place. The same bits come out.

    Models here have no dropout, so there is no random state to restore. Names of parameters stay,
    as no module is wrapped; what is wrapped is inside whatever hooks FSDP adds later.
    """
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
