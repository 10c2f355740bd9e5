"""The interface between a worker process and the runtime that computes for it.

A backend owns one rank's model, in one arena. The worker process calls the backend from a single
thread, in the order that the scheduler admitted, and moves the arena through the StateManager
between calls. The backend itself has no connections (PlexRL §5.1: a Worker is a thin adapter).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.statemanager.checkpoint.places.choice import Location
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.storage.location import join
from plexrl.wire.messages import RankShare
from plexrl.wire.operations import OperationKind
from plexrl.wire.tensors import Arrays

if TYPE_CHECKING:
    from plexrl.worker.rollout.rollout_engine import EngineStats

Emit = Callable[[int, list[int], list[float]], None]
"""Callback for (sample row, new tokens, their logprobs) during a generation."""
EmitRow = Callable[[int, list[int], list[float], int, list[list[int]], list[float] | None], None]
"""Callback for a row that has ended: row, tokens, logprobs, why it ended (a number of
`plexrl.worker.rollout.generation`), `[start, weights_seq, trainer_step]` of each span of tokens
that one version drew, and the tokens' logprobs under the policy that drew them; None: the
generation did not ask for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendResult:
    """One rank's result: small values that the router gathers over ranks, and arrays."""

    result: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCall:
    """One operation, as one rank receives it."""

    operation: str
    kind: OperationKind
    params: Any
    """An instance of `PARAMS_BY_KIND[kind]`; None for a kind without parameters."""
    arrays: Arrays
    seq: int
    """Version of the state after this call."""
    trainer_step: int = 0
    """Optimizer steps in the weights before this call."""
    share: RankShare = RankShare()
    """What the router's plan adds for this rank."""
    job: str = ""

    def checkpoint_path(self, root: Location) -> str:
        """The path or URL of the checkpoint that a `load_checkpoint` names; `root` holds all jobs'
        checkpoints."""
        job, name = self.params.job or self.job, self.params.name
        return join(str(root), str(job), str(name))


class SharedWeights(Protocol):
    """Frozen weights, in device memory that several deployments share."""

    @property
    def arena(self) -> WorkerArena:
        """Memory of the weights."""
        ...

    @property
    def content(self) -> str:
        """Digest; equal for two objects whose bytes are equal."""
        ...

    def fill(self) -> None:
        """Write all weights to the arena."""
        ...


class Backend(ABC):
    """One rank of a deployment."""

    arena: WorkerArena
    """Holds every tensor of `slices()` except those in `host_arena`; reserved by `lay_out`."""
    host_arena: HostArena | None = None
    """Holds the state that stays in host memory; absent: there is none."""

    @property
    def trainer_step(self) -> int:
        """Optimizer steps in the weights, for a backend that trains."""
        return 0

    @property
    def frozen_base(self) -> SharedWeights | None:
        """Weights that are not trained and are shared with other deployments; absent: there are
        none."""
        return None

    @property
    def lay_out_bytes(self) -> int:
        """Device memory that `lay_out` allocates outside of the arenas, at most."""
        return 0

    @abstractmethod
    def lay_out(self) -> None:
        """Make the model without its weights, and give all its state an address in the arenas.

        Called once per process, before any other method. Nothing is written to the arenas, which
        have no memory yet.
        """

    def materialise(self) -> None:
        """Write the initial weights to the arenas, which have memory and read as zero.

        The same spec gives the same bits.
        """
        return

    @abstractmethod
    def slices(self) -> tuple[StateSlice, ...]:
        """All state in the arenas, in arena order. Offsets in host memory begin at `host_start`."""

    def pulled_slices(self) -> tuple[StateSlice, ...]:
        """The slices that a weight sync replaces."""
        return self.slices()

    def live_parts(self) -> frozenset[StatePart]:
        """The parts that hold information: gradients do so only between backward and step."""
        return frozenset(piece.key.part for piece in self.slices())

    def check_weights(self) -> None:
        """Raises `NonFiniteWeightsError`, on every rank alike, if the backend finds weights that
        are not finite."""
        return

    @property
    def weights_are_checked(self) -> bool:
        """Whether `check_weights` would find nothing without a look at the weights, which may be
        offloaded. The same on every rank."""
        return True

    def before_offload(self) -> None:
        """Free everything derived from the arena (gathered parameters, KV cache)."""
        return

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Reset the other parts and derived state: the arena holds a loaded version of `parts`."""
        del parts

    def after_pull(self, *, seq: int, trainer_step: int) -> None:
        """Use the parameters that a weight sync wrote to the arena: version `seq` of the
        deployment, after `trainer_step` steps of the trainer's optimizer."""
        del seq, trainer_step

    def gather_at_start(self, value: str) -> list[str]:
        """As `gather`, over all ranks that must call `lay_out` together; before it."""
        return self.gather(value)

    @abstractmethod
    def gather(self, value: str) -> list[str]:
        """All-gather of one string per rank, in rank order."""

    @property
    def model_type(self) -> str:
        """Model type of `transformers`, by which a checkpoint's files name tensors."""
        return ""

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        """Small files that complete a checkpoint for other tools (configuration, tokenizer), by
        name. `dtype` is the one that floats are cast to, in the spelling of `transformers`."""
        del dtype
        return {}

    @property
    def stepped_bytes(self) -> int:
        """Size of the memory that stands for the arena in `step_stored`; 0: the backend has no such
        steps."""
        return 0

    def step_stored(self, call: BackendCall, arena: HostArena) -> BackendResult:
        """Run an optim_step on the state as it was offloaded, which lies in `arena`, up to the end
        of the arena's last slice, and in `host_arena`. `live_parts` says what is left of it. Raises
        as `run`, and on every rank alike."""
        del call, arena
        raise ConflictError("this backend steps an optimizer on its device only")

    @abstractmethod
    def run(self, call: BackendCall) -> BackendResult:
        """Run a forward, forward_backward, optim_step, zero_grad or load_checkpoint.

        Raises:
            NonFiniteWeightsError: the operation made weights that are not finite; on every rank.
            PlexRLError: refused, and the state is unchanged; on every rank.
        """


class RolloutBackend(Backend):
    """A backend that also generates, many calls at a time."""

    @abstractmethod
    def submit(self, call: BackendCall, emit: Emit | None, emit_row: EmitRow | None = None) -> None:
        """Queue a `generate`. Its samples join the running batch when slots are free. Rows are
        numbered over the whole call, of which this may be a part."""

    @abstractmethod
    def abort(self, operation: str, rows: Collection[int] | None = None) -> None:
        """End an operation's rows, or some of them, with the tokens drawn so far. No effect on rows
        that have ended, that another replica has, or of an unknown operation."""

    @abstractmethod
    def step(self) -> list[tuple[str, BackendResult]]:
        """Draw one token for every running sample; returns the operations that finished."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True if an operation is unfinished and generation is not paused."""

    @abstractmethod
    def pause(self, *, recompute_kv: bool = True) -> None:
        """Draw no tokens until `resume`. Weights may be pulled and the state moved meanwhile.

        With `recompute_kv`, the KV cache of running samples is recomputed after a pull; without it,
        they continue with the cache of the previous weights.
        """

    @abstractmethod
    def resume(self) -> None:
        """Continue generation with the weights that are in the arena."""

    def set_tp(self, tp: int, kv: str) -> "EngineStats":
        """Continue all generations in tensor-parallel groups of `tp` ranks (PAT §4.3). `kv` is
        `migrate`, to move the KV cache, or `recompute`.

        Raises:
            InvalidRequestError: the engine has no groups of that size, or there is no such way.
        """
        del kv
        raise InvalidRequestError(
            f"the tensor-parallel groups of this engine do not change, and tp is {tp}: create the "
            "deployment with tp_sizes"
        )

    @abstractmethod
    def interrupt(self, operation: str) -> BackendResult | None:
        """Remove an operation and return its result so far; `step` does not return it. None: the
        operation is unknown."""

    @abstractmethod
    def stats(self) -> "EngineStats":
        """Counters and queue lengths of the engine."""

    @abstractmethod
    def load(self) -> dict[str, Any]:
        """The lengths of all unfinished rows, and what decode steps take: `rows` has operation,
        row, tokens and whether it runs; `steps` has number, rows, tokens in the KV cache, seconds.
        """
