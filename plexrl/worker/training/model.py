"""The interface that a training framework implements for PlexRL.

`plexrl.worker.training.backend` turns operations into these calls.

Shapes: B rows, L tokens of the longest row of a micro-batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
import torch.distributed as dist

from plexrl.model.parallelism import Coordinates, Parallelism
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.wire.operations import AdamParams
from plexrl.worker.batches.logprobs import TokenValues, Wanted
from plexrl.worker.batches.packing import MicroBatch
from plexrl.worker.batches.values import output_name
from plexrl.worker.state.arena_tensors import AnyArena
from plexrl.worker.state.device import CPU, WorkerDevice

if TYPE_CHECKING:
    from plexrl.model.deployment_spec import DeploymentSpec
    from plexrl.worker.interface.backend import SharedWeights

LossOfBatch = Callable[[TokenValues, MicroBatch], torch.Tensor]
"""Maps the numbers of a micro-batch's tokens to its share of the batch's loss, a scalar. Called
once for each micro-batch, in order, on the ranks that have the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRank:
    """One rank of a deployment."""

    spec: "DeploymentSpec"
    rank: int
    """Rank in the default process group, numbered as in `plexrl.model.parallelism`."""
    device: WorkerDevice = CPU

    @property
    def layout(self) -> Parallelism:
        """The deployment's parallel layout."""
        return self.spec.layout

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinate on every axis of the layout."""
        return self.layout.coordinates(self.rank)


class TrainingState(Protocol):
    """A rank's parameters, gradients and optimizer in its arenas."""

    @property
    def arena(self) -> WorkerArena:
        """Holds every slice except those in `host_arena`."""
        ...

    @property
    def host_arena(self) -> HostArena | None:
        """Holds the state that stays in host memory; absent: there is none."""
        ...

    @property
    def slices(self) -> tuple[StateSlice, ...]:
        """All state, in arena order."""
        ...

    @property
    def memory(self) -> AnyArena:
        """The arena, or what stands for it."""
        ...

    @property
    def stepped_bytes(self) -> int:
        """End of the last parameter and gradient in the arena."""
        ...

    def in_host(self, arena: HostArena) -> Self:
        """The same state with parameters and gradients in `arena`, for norms and steps only."""
        ...

    def step(self, params: AdamParams, gradient_factor: float) -> None:
        """One step of AdamW or SGD, elementwise. Raises as `TrainingModel.step`."""
        ...

    def squared_gradients(self) -> torch.Tensor:
        """Sum of squares over the gradients that this rank counts, a scalar."""
        ...

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        ...


class TrainingModel(ABC):
    """One rank of a model, with all its state in arenas.

    Its slices are those of the Hugging Face model (same names, boxes of whole tensors), even if the
    framework fuses or shards parameters. So checkpoints, weight sync and loads under another layout
    do not depend on the framework. All ranks make every call together, in the same order, after the
    default process group exists.
    """

    config: Any
    """The model's `transformers` configuration."""
    generation_config: Any
    """The model's `transformers` generation configuration, for checkpoints; None: it has none."""
    _state: TrainingState
    """Set by `lay_out`."""

    def __init__(self, rank: TrainingRank) -> None:
        self._rank = rank

    @property
    def spec(self) -> "DeploymentSpec":
        """What the deployment was asked to be."""
        return self._rank.spec

    @property
    def arena(self) -> WorkerArena:
        """Holds every slice except those in `host_arena`; exists once `lay_out` has returned."""
        return self._state.arena

    @property
    def host_arena(self) -> HostArena | None:
        """Holds the state that stays in host memory; absent: there is none."""
        return self._state.host_arena

    @property
    def frozen_base(self) -> "SharedWeights | None":
        """Weights that are not trained, shared with other deployments; absent: all are trained."""
        return None

    @property
    def output(self) -> str:
        """Name of the numbers that losses are functions of: `logprobs`, or `values`."""
        return output_name(self._rank.spec.model)

    @abstractmethod
    def lay_out(self) -> None:
        """Make the model without its weights, and give all its state an address in the arenas.
        Nothing is written to the arenas, which have no memory yet."""

    @abstractmethod
    def materialise(self) -> None:
        """Write this rank's initial weights to the arenas, which have memory and read as zero.

        The same spec gives the same bits on every start and every layout.
        """

    def slices(self) -> tuple[StateSlice, ...]:
        """All state in the arenas, in arena order. Offsets in host memory begin at
        `host_start(arena.nbytes)`."""
        return self._state.slices

    @abstractmethod
    def before_offload(self) -> None:
        """Free everything derived from the arenas (gathered parameters, casts)."""

    @abstractmethod
    def after_load(self, *, gradients_loaded: bool) -> None:
        """Recompute everything derived from the arenas, whose contents were replaced. Unless
        `gradients_loaded`, set the gradients to zero."""

    @abstractmethod
    def forward(self, batches: Sequence[MicroBatch], wanted: Wanted) -> list[TokenValues]:
        """Logprob of every token given the tokens before it, and what is `wanted` beside it; with a
        value head the value of these tokens instead. For each micro-batch, on its device, without a
        graph. Column 0 and padding are 0. Ranks without outputs return zeros, and of the logprobs
        or values only."""

    @abstractmethod
    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: LossOfBatch, wanted: Wanted
    ) -> list[torch.Tensor]:
        """Logprobs or values as `forward`, and add the gradients of the sum of all losses, over
        micro-batches and data ranks, to the present gradients. `wanted` is what the loss needs
        beside them.

        All micro-batches are passed at once, because a pipeline interleaves them.
        """

    def gradient_norm(self) -> float:
        """Norm of all gradients of the whole model, each element counted once even if several ranks
        hold it; the same on every rank."""
        squared = self._squared_gradients()
        dist.all_reduce(squared)
        return float(squared.sqrt())

    @property
    def stepped_bytes(self) -> int:
        """Size of the memory for `in_host`; 0: the optimizer is not in host memory."""
        return 0 if self.host_arena is None else self._state.stepped_bytes

    @contextmanager
    def in_host(self, arena: HostArena) -> Iterator[None]:
        """Within the block norms, `step_in_host` and `zero_gradients` are of the parameters and
        gradients in `arena`, which are laid out as in the model's own arena."""
        own = self._state
        self._state = own.in_host(arena)
        try:
            yield
        finally:
            self._state = own

    def step_in_host(self, params: AdamParams, *, gradient_factor: float) -> None:
        """As `step`, within `in_host`; nothing that is derived from the parameters is made."""
        self._state.step(params, gradient_factor)

    @property
    def memory(self) -> AnyArena:
        """Where the state is that norms and steps are of now: `arena`, or that of `in_host`."""
        return self._state.memory

    @abstractmethod
    def step(self, params: AdamParams, *, gradient_factor: float) -> None:
        """One step with the gradients times `gradient_factor`. It may overwrite gradients.

        Raises:
            StateTierFullError: host memory has no space for the step; nothing has changed.
        """

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        self._state.zero_gradients()

    def _squared_gradients(self) -> torch.Tensor:
        """Sum of squares over the gradients that this rank counts, a scalar."""
        return self._state.squared_gradients()

    def _keep_configuration(self, model: Any) -> Any:
        """Keep a Hugging Face model's configurations; returns the model."""
        self.config = model.config
        self.generation_config = getattr(model, "generation_config", None)
        return model
