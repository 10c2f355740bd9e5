"""What a worker process asks of the runtime it wraps.

A backend owns one rank's model in one arena. The worker process calls it from a single thread,
in the order the scheduler admitted, and moves the arena through the StateManager between calls;
the backend never talks to anyone itself (PlexRL §5.1: a Worker is a thin adapter).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.wire.operations import OperationKind
from plexrl.wire.tensors import Arrays

if TYPE_CHECKING:
    from plexrl.worker.rollout.protocol import EngineStats

Emit = Callable[[int, list[int], list[float]], None]
"""Takes (sample row, new tokens, their logprobs) while a generation is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendResult:
    """One rank's answer: small values for the router's gather rule, and arrays."""

    result: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCall:
    """One operation as a rank sees it."""

    operation: str
    kind: OperationKind
    params: Any
    """An instance of `PARAMS_BY_KIND[kind]`."""
    rank_params: Mapping[str, Any]
    """The router's part of the parameters for this rank (dispatch plan)."""
    arrays: Arrays
    seq: int
    """Version of the state after this call."""
    trainer_step: int = 0
    """Optimizer steps in the weights before this call."""


class Backend(Protocol):
    """One rank of a deployment."""

    @property
    def arena(self) -> Arena:
        """Holds every tensor of `slices()` but what is in `host_arena`; allocated by `build`."""
        ...

    @property
    def host_arena(self) -> HostArena | None:
        """Holds what stays in host memory; absent where nothing does."""
        ...

    def build(self) -> None:
        """Make the model with its initial weights and move all its state into the arena.

        Called once per process, before anything else. Same spec, same bits on every start.
        """
        ...

    def slices(self) -> tuple[StateSlice, ...]:
        """Everything in the arenas, in their order; places in host memory count on from
        `host_start`."""
        ...

    def live_parts(self) -> frozenset[StatePart]:
        """The parts that hold information now; gradients do only between backward and step."""
        ...

    def before_offload(self) -> None:
        """Drop whatever is derived from the arena (gathered parameters, KV cache)."""
        ...

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """The arena holds a loaded version made of `parts`; reset the others and derived state."""
        ...

    def after_pull(self, *, seq: int, trainer_step: int) -> None:
        """The arena's parameters were replaced by a weight sync: they are version `seq` of the
        deployment, with so many steps of the trainer's optimizer in them."""
        ...

    def gather(self, value: str) -> list[str]:
        """Every rank's value, by rank, once every rank has come to this."""
        ...

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        """The small files that make the tensors of a checkpoint a model for others, by name.

        `dtype` is the one that floats are cast to, as `transformers` names it.
        """
        ...

    def run(self, call: BackendCall) -> BackendResult:
        """Carry out forward, forward_backward, optim_step or load_checkpoint.

        Raises:
            NonFiniteWeightsError: it made weights that are not finite, on every rank alike.
            PlexRLError: refused with the state as it was, on every rank alike.
        """
        ...


class RolloutBackend(Backend, Protocol):
    """A backend that also generates, many calls at a time."""

    def submit(self, call: BackendCall, emit: Emit | None) -> None:
        """Queue a `generate`; its samples join the running batch as slots come free."""
        ...

    def abort(self, operation: str) -> None:
        """End an operation's samples now; it finishes with what they have. Unknown: no effect."""
        ...

    def step(self) -> list[tuple[str, BackendResult]]:
        """Draw one token for every running sample; returns the operations that this finished."""
        ...

    @property
    def has_work(self) -> bool:
        """Some submitted operation is unfinished, and not because generation is paused."""
        ...

    def pause(self, *, recompute_kv: bool = True) -> None:
        """Draw nothing until `resume`; between the two, weights may be pulled or the state moved.

        `recompute_kv` says whether samples under way are computed anew with pulled weights, or go
        on with what they cached under the former ones.
        """
        ...

    def resume(self) -> None:
        """Go on where `pause` stopped, with the weights that are there."""
        ...

    def interrupt(self, operation: str) -> BackendResult | None:
        """Take an operation out now, with what it has; `step` will not return it. None: unknown."""
        ...

    def stats(self) -> "EngineStats":
        """How the engine stands."""
        ...
