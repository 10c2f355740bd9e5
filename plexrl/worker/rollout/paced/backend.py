"""A paced engine as a rollout backend."""

from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.latency.pace import Pace
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.text.files import as_ids
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.worker.interface.backend import BackendCall, BackendResult
from plexrl.worker.rollout.generating_backend import GeneratingBackend
from plexrl.worker.rollout.paced.engine import PacedEngine
from plexrl.worker.training.paced.pacer import Pacer
from plexrl.worker.training.paced.state import WEIGHT, PacedState, initial_weights


class PacedRolloutBackend(GeneratingBackend[PacedEngine]):
    """One rank. The first rank of a tensor-parallel group generates for all of them, and draws by
    its own part of the weights; the others only have theirs."""

    def __init__(self, spec: DeploymentSpec, rank: int, pace: Pace, pacer: Pacer) -> None:
        super().__init__(spec)
        self._tp_rank = spec.layout.coordinates(rank).tp
        self._decoding = pace.decoding(spec.layout.tp)
        self._pace, self._pacer = pace, pacer

    def lay_out(self) -> None:
        self._state = PacedState((WEIGHT,), part=self._tp_rank, parts=self._spec.layout.tp)
        self.arena = self._state.arena

    def materialise(self) -> None:
        model = self._spec.model
        weight = self._state[WEIGHT]
        weight[:] = initial_weights(model.seed, self._state.first, len(weight))
        self._engine = self._leading = PacedEngine(
            self._decoding,
            self._pacer,
            weights=self._state.weights_word,
            vocabulary=model.dimensions.vocabulary,
            ends=as_ids(model.config.get("eos_token_id")),
            sequence_tokens_max=self._spec.max_sequence_tokens,
            slots=self._spec.max_concurrent_samples,
        )
        self._described: dict[str, Any] = {
            "model": f"paced {self._pace.text}",
            "dtype": self._spec.dtype,
            "device": "paced",
            "kv_token_bytes": self._decoding.kv_token_bytes * self._spec.layout.tp,
        }

    def slices(self) -> tuple[StateSlice, ...]:
        return self._state.slices

    def before_offload(self) -> None:
        self.engine.drop_cache()

    def after_load(self, parts: frozenset[StatePart]) -> None:
        del parts
        self.engine.weights_loaded()

    def gather(self, value: str) -> list[str]:
        """As for paced trainers."""
        return [value]

    def run(self, call: BackendCall) -> BackendResult:
        """Refused: nothing but `generate` is an operation of a paced rollout.

        Raises:
            InvalidRequestError: always.
        """
        raise InvalidRequestError(
            f"a paced deployment has no {call.kind.value}: its model has no checkpoints; leave "
            "pace out to generate with a real one"
        )
