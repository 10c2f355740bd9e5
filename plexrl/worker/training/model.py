"""What a training framework has to do for PlexRL; everything else all of them share.

`plexrl.worker.training.backend` turns operations into these calls. Shapes: B rows, L tokens of the
longest row of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from plexrl.model.parallelism import Coordinates, Parallelism
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.packing import MicroBatch

if TYPE_CHECKING:
    from plexrl.model.deployment_spec import DeploymentSpec
    from plexrl.statemanager.client.arena import Arena

LossOfBatch = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""Logprobs float32 `[B, L]` of a micro-batch to its part of the batch's loss, a scalar. Called once
for each micro-batch, in order, on the ranks that have the logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRank:
    """Which rank of which deployment a model is."""

    spec: "DeploymentSpec"
    rank: int
    """In the default process group, numbered as `plexrl.model.parallelism` says."""

    @property
    def layout(self) -> Parallelism:
        """How the model lies over the ranks."""
        return self.spec.layout

    @property
    def place(self) -> Coordinates:
        """This rank's place on every axis of it."""
        return self.layout.coordinates(self.rank)


class TrainingModel(Protocol):
    """One rank of a model, all of whose state lies in its arenas.

    Its slices are those of the Hugging Face model: names as there, boxes of the whole tensors,
    whatever the framework fuses or shards. So checkpoints, weight sync and loads under another
    layout need nothing of the framework. Every call is made by all ranks together, in the same
    order, with the default process group there.
    """

    @property
    def arena(self) -> "Arena":
        """Holds every slice but what is in `host_arena`; there once `build` has returned."""
        ...

    @property
    def host_arena(self) -> HostArena | None:
        """Holds what stays in host memory; absent where nothing does."""
        ...

    @property
    def config(self) -> Any:
        """The model's `transformers` configuration."""
        ...

    @property
    def generation_config(self) -> Any:
        """What `transformers` generates by, for checkpoints; None where there is none."""
        ...

    def build(self) -> None:
        """Make the model with its initial weights and move all its state into the arenas.

        Same spec, same bits on every start, and on every layout.
        """
        ...

    def slices(self) -> tuple[StateSlice, ...]:
        """Everything in the arenas, in their order; places in host memory count on from
        `host_start(arena.nbytes)`."""
        ...

    def before_offload(self) -> None:
        """Drop whatever is derived from the arenas (gathered parameters, casts)."""
        ...

    def after_load(self, *, gradients_loaded: bool) -> None:
        """The arenas' contents were replaced, gradients among them or not: gradients that were not
        are to be zero, and what is derived from the arenas is to be made anew."""
        ...

    def forward(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Logprob of every token given those before it, float32 `[B, L]` for each micro-batch on
        the CPU, without a graph; column 0 and padding are 0. Ranks without outputs return zeros."""
        ...

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch
    ) -> list[torch.Tensor]:
        """As `forward`, and add the gradients of the sum of all losses, over the micro-batches and
        the data ranks, to those that are there.

        All micro-batches come at once because a pipeline runs them interleaved.
        """
        ...

    def gradient_norm(self) -> float:
        """Of all gradients of the whole model, each element counted once however many ranks hold
        it; the same on every rank."""
        ...

    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        """One AdamW step by the gradients times `gradient_factor`; what they are then is no matter.

        Raises:
            StateTierFullError: host memory has no room for it; nothing has changed, gradients
                neither.
        """
        ...

    def zero_gradients(self) -> None:
        """Set them all to zero."""
        ...
