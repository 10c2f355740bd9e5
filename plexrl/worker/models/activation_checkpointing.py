"""Activation checkpointing: activations are recomputed in the backward pass instead of kept."""

import functools
from collections.abc import Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(layers: Iterable[nn.Module]) -> None:
    """Make each layer keep only its input, in place; results are bit-equal.

    Models here have no dropout, so no random state has to be restored. Only `forward` is wrapped,
    so parameter names do not change, and hooks that FSDP adds later are outside of the wrapper.
    """
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
