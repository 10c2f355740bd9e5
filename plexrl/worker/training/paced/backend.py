"""A paced trainer: one rank whose operations last as long as those of the modelled one.

The state is real: gradients depend on every value of the batch and on the weights, and a step
changes the weights by them. No model is computed, so losses mean nothing. A rank steps its own part
by its own rows; nothing is exchanged between ranks.
"""

import math

import numpy as np

from plexrl.errors import InvalidRequestError, NoGradientsError
from plexrl.latency.pace import Pace
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.wire.operations import AdamParams, OperationKind
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult
from plexrl.worker.training.paced.pacer import Pacer
from plexrl.worker.training.paced.state import (
    GRADIENT,
    MOMENT,
    STEP,
    WEIGHT,
    PacedState,
    initial_weights,
    logprobs_of,
    signed_units,
    word_of_arrays,
)


class PacedTrainingBackend(Backend):
    """One rank of a paced train deployment."""

    def __init__(self, spec: DeploymentSpec, rank: int, pace: Pace, pacer: Pacer) -> None:
        self._spec, self._rank = spec, rank
        self._training = pace.training(spec.workers)
        self._pacer = pacer
        self._gradients_pending = False

    @property
    def trainer_step(self) -> int:
        """Optimizer steps in the parameters."""
        return int(self._state[STEP][0])

    def lay_out(self) -> None:
        self._state = PacedState(
            (WEIGHT, GRADIENT, MOMENT, STEP), part=self._rank, parts=self._spec.workers
        )
        self.arena = self._state.arena

    def materialise(self) -> None:
        weight = self._state[WEIGHT]
        weight[:] = initial_weights(self._spec.model.seed, self._state.first, len(weight))

    def slices(self) -> tuple[StateSlice, ...]:
        return self._state.slices

    def live_parts(self) -> frozenset[StatePart]:
        """All parts; gradients only while they wait for a step."""
        parts = {StatePart.PARAMETER, StatePart.OPTIMIZER}
        return frozenset(parts | {StatePart.GRADIENT} if self._gradients_pending else parts)

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Gradients that the version does not contain are zero."""
        self._gradients_pending = StatePart.GRADIENT in parts
        if not self._gradients_pending:
            self._drop_gradients()

    def gather(self, value: str) -> list[str]:
        """Paced ranks agree on nothing: each is sent the same operations."""
        return [value]

    def run(self, call: BackendCall) -> BackendResult:
        """Carry out one operation in its modelled time. Raises as `Backend.run`."""
        training = self._training
        match call.kind:
            case OperationKind.FORWARD:
                with self._pacer.lasts(training.log_prob_s(self._batch_tokens(call))):
                    return BackendResult(arrays={"logprobs": self._logprobs(call)})
            case OperationKind.FORWARD_BACKWARD:
                with self._pacer.lasts(training.update_s(self._batch_tokens(call))):
                    return self._forward_backward(call)
            case OperationKind.OPTIM_STEP:
                with self._pacer.lasts(training.step_s()):
                    return self._optim_step(call.params)
            case OperationKind.ZERO_GRAD:
                self._drop_gradients()
                return BackendResult()
            case _:
                raise InvalidRequestError(
                    f"a paced deployment has no {call.kind.value}: its model has no checkpoints; "
                    "leave pace out to train a real one"
                )

    def _batch_tokens(self, call: BackendCall) -> int:
        """Tokens of the batch, of which this rank has about an equal share."""
        layout = self._spec.layout
        return len(call.arrays.get("tokens", ())) * layout.dp * layout.cp

    def _logprobs(self, call: BackendCall) -> "np.ndarray":
        return logprobs_of(call.arrays.get("tokens", np.empty(0)), self._state.weights_word())

    def _forward_backward(self, call: BackendCall) -> BackendResult:
        logprobs = self._logprobs(call)
        gradient = self._state[GRADIENT]
        word = word_of_arrays({**call.arrays, "own": logprobs})
        gradient += signed_units(np.arange(len(gradient), dtype=np.uint64), word)
        self._gradients_pending = True
        mask = call.arrays.get("mask", np.empty(0))
        loss = -float(logprobs.sum(dtype=np.float64)) / call.share.denominator
        return BackendResult(
            result={"sums": {"loss": loss, "tokens": float(mask.sum())}, "maxes": {}},
            arrays={"logprobs": logprobs},
        )

    def _optim_step(self, params: AdamParams) -> BackendResult:
        if not self._gradients_pending:
            refusal = NoGradientsError(
                "there are no gradients for this step, and nothing was changed: submit a "
                "forward_backward before each optim_step"
            )
            return BackendResult(result={"error": refusal.to_wire()})
        gradient = self._state[GRADIENT] / np.float32(params.divide_by)
        moment, weight = self._state[MOMENT], self._state[WEIGHT]
        moment *= np.float32(params.beta1)
        moment += np.float32(1.0 - params.beta1) * gradient
        weight -= np.float32(params.learning_rate) * (
            moment + np.float32(params.weight_decay) * weight
        )
        self._state[STEP][0] += 1
        norm = math.sqrt(float(np.square(gradient, dtype=np.float64).sum()))
        self._drop_gradients()
        return BackendResult(
            result={
                "metrics": {"grad_norm": norm, "learning_rate": params.learning_rate},
                "trainer_step": self.trainer_step,
            }
        )

    def _drop_gradients(self) -> None:
        self._state[GRADIENT][:] = 0
        self._gradients_pending = False
