"""The backend of every training framework: operations, losses, clipping, checkpoints.

A framework's own part is its `TrainingModel`.
"""

import copy
import math
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    NoGradientsError,
    NonFiniteGradientError,
)
from plexrl.model.lora import adapter_config
from plexrl.statemanager.checkpoint.places.choice import Location
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.wire.operations import AdamParams, OperationKind
from plexrl.worker.batches.logprobs import TokenValues, wanted_by_forward, wanted_by_loss
from plexrl.worker.batches.losses import compute_loss
from plexrl.worker.batches.packed_batches import micro_batches_of
from plexrl.worker.batches.packing import MicroBatch, unpack, unpack_named
from plexrl.worker.batches.results import named_on_cpu, on_cpu
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult, SharedWeights
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.checkpoint_files import model_files, tokenizer_files
from plexrl.worker.state.contents.finite_weights import check_finite_weights
from plexrl.worker.state.host.agreed_memory import memory_on_all_ranks
from plexrl.worker.training.flat_state import STEP
from plexrl.worker.training.loading import fill_state
from plexrl.worker.training.model import TrainingModel, TrainingRank

LOSS_ARRAYS = (
    *("mask", "weights", "logprobs", "prox_logprobs", "advantages", "ref_logprobs"),
    *("returns", "values"),
)


class Step(Protocol):
    """A step of a model, on its device or in host memory."""

    def __call__(self, params: AdamParams, *, gradient_factor: float) -> None:
        """As `TrainingModel.step`."""
        ...


class TrainingBackend(Backend):
    """One rank of a train deployment. The default process group must exist before `lay_out`."""

    def __init__(self, rank: TrainingRank, model: TrainingModel, checkpoint_url: Location) -> None:
        self._rank = rank
        self.model = model
        self._checkpoint_url = checkpoint_url
        self._gradients_pending = False
        self._weights_are_finite = False
        """The last check found all weights finite, and no operation has changed them since."""

    @property
    def frozen_base(self) -> SharedWeights | None:
        return self.model.frozen_base

    @property
    def trainer_step(self) -> int:
        """Optimizer steps in the parameters. The count is part of the state, so a recovery or a
        load of a checkpoint restores it."""
        piece = next(stored for stored in self.model.slices() if stored.key == STEP)
        if self.host_arena is None:
            return int(view(self.arena, piece).item())
        start = piece.arena_offset - host_start(self.arena.nbytes)
        return int(
            np.frombuffer(self.host_arena.buffer, dtype=np.float32, count=1, offset=start)[0]
        )

    def lay_out(self) -> None:
        self.model.lay_out()
        self.arena, self.host_arena = self.model.arena, self.model.host_arena

    def materialise(self) -> None:
        self.model.materialise()

    def slices(self) -> tuple[StateSlice, ...]:
        return self.model.slices()

    def live_parts(self) -> frozenset[StatePart]:
        """All parts; gradients only while they wait for a step."""
        parts = {piece.key.part for piece in self.model.slices()}
        if not self._gradients_pending:
            parts.discard(StatePart.GRADIENT)
        return frozenset(parts)

    def before_offload(self) -> None:
        self.model.before_offload()

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Reset derived state. Gradients that the version does not contain are zero."""
        self._weights_are_finite = False
        self._gradients_pending = StatePart.GRADIENT in parts
        self.model.after_load(gradients_loaded=self._gradients_pending)

    def after_pull(self, *, seq: int, trainer_step: int) -> None:
        """Refused: a trainer never pulls weights."""
        del seq, trainer_step
        raise InvalidRequestError("a train deployment publishes weights; it does not pull them")

    def check_weights(self) -> None:
        """Raises `NonFiniteWeightsError`, on every rank, if a parameter is not finite."""
        if not self._weights_are_finite:
            check_finite_weights(self.model.memory, self.slices(), self.gather)
            self._weights_are_finite = True

    @property
    def weights_are_checked(self) -> bool:
        """As `Backend.weights_are_checked`."""
        return self._weights_are_finite

    def gather(self, value: str) -> list[str]:
        """All-gather over the process group."""
        found = [""] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    @property
    def model_type(self) -> str:
        """As `Backend.model_type`."""
        return str(self.model.config.model_type)

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        """Configuration and tokenizer; for adapters, PEFT's configuration and the tokenizer."""
        spec = self._rank.spec
        if spec.lora is not None:
            files = tokenizer_files(spec.model)
            return {**files, "adapter_config.json": adapter_config(spec.model, spec.lora)}
        config = copy.deepcopy(self.model.config)
        config.dtype = getattr(torch, dtype or "float32")
        return model_files(spec.model, config, self.model.generation_config)

    def run(self, call: BackendCall) -> BackendResult:
        """Carry out one operation. Raises as `Backend.run`."""
        match call.kind:
            case OperationKind.FORWARD:
                return self._forward(call)
            case OperationKind.FORWARD_BACKWARD:
                return self._forward_backward(call)
            case OperationKind.OPTIM_STEP:
                return self._optim_step(call.params, self.model.step)
            case OperationKind.ZERO_GRAD:
                self._drop_gradients()
                return BackendResult()
            case OperationKind.LOAD_CHECKPOINT:
                return self._load(call)
            case _:
                raise InvalidRequestError(f"{call.kind.value} is no operation of a train backend")

    def _forward(self, call: BackendCall) -> BackendResult:
        batches = self._micro_batches(call)
        values = named_on_cpu(self.model.forward(batches, wanted_by_forward(call.params)))
        return BackendResult(arrays=unpack_named(batches, values, _tokens(call)))

    def _forward_backward(self, call: BackendCall) -> BackendResult:
        batches = self._micro_batches(call)
        denominator = call.share.denominator
        names: list[str] = []
        found_sums: list[torch.Tensor] = []

        def loss(values: TokenValues, batch: MicroBatch) -> torch.Tensor:
            found = compute_loss(
                call.params.loss,
                values[self.model.output],
                _inputs(batch),
                denominator,
                entropy_BL=values.get("entropy"),
                output=self.model.output.removesuffix("s"),
            )
            named = {"loss": found.loss.detach(), **found.sums}
            names.extend(named)
            found_sums.extend(torch.as_tensor(value) for value in named.values())
            return found.loss

        values = self.model.forward_backward(batches, loss, wanted_by_loss(call.params.loss))
        self._gradients_pending = True
        # One copy for everything that leaves the device.
        found = on_cpu([*values, *found_sums])
        values, sums = found[: len(values)], {"loss": 0.0}
        for name, value in zip(names, found[len(values) :], strict=True):
            sums[name] = sums.get(name, 0.0) + float(value)
        is_finite = all(map(math.isfinite, sums.values())) and all(
            bool(torch.isfinite(value).all()) for value in values
        )
        result: dict[str, Any] = {"sums": sums, "maxes": {}}
        # The ranks have different rows, and must drop the gradients together.
        if not all(self.gather("1" if is_finite else "")):
            self._drop_gradients()
            dropped = NonFiniteGradientError(
                f"the loss or one of the {self.model.output} of this batch is not finite: all "
                "gradients since the last step were dropped and the parameters are unchanged; look "
                "for extreme advantages, logprobs, coefficients of the loss or learning rates"
            )
            result["error"] = dropped.to_wire()
        return BackendResult(
            result=result,
            arrays={self.model.output: unpack(batches, values, _tokens(call))},
        )

    def _micro_batches(self, call: BackendCall) -> list[MicroBatch]:
        found = micro_batches_of(call.arrays, call.share.micro_batches, self._rank.layout.cp)
        return [batch.placed(self._rank.device.place) for batch in found]

    @property
    def stepped_bytes(self) -> int:
        """As `Backend.stepped_bytes`."""
        return self.model.stepped_bytes

    def step_stored(self, call: BackendCall, arena: HostArena) -> BackendResult:
        """As `Backend.step_stored`."""
        if call.params.optimizer == "muon":
            raise ConflictError("muon steps on the device only")
        with self.model.in_host(arena):
            return self._optim_step(call.params, self.model.step_in_host)

    def _optim_step(self, params: AdamParams, step: Step) -> BackendResult:
        if not self._gradients_pending:
            # AdamW would step by the moments alone. The operation finishes with the error as its
            # result, as below: a replay changes nothing either.
            refusal = NoGradientsError(
                "there are no gradients for this step, and nothing was changed: submit a "
                "forward_backward before each optim_step; optim_step, zero_grad, load_checkpoint "
                "and attach_job drop gradients"
            )
            return BackendResult(result={"error": refusal.to_wire()})
        norm = self.model.gradient_norm() / params.divide_by
        if not math.isfinite(norm):
            self._drop_gradients()
            # Dropping gradients is a mutation that a recovery must replay in order, so the
            # operation finishes with the error as its result.
            dropped = NonFiniteGradientError(
                f"the gradient norm is {norm}: the gradients were dropped and the parameters are "
                "unchanged; look for extreme advantages, logprobs or learning rates"
            )
            return BackendResult(result={"error": dropped.to_wire()})
        clips = params.grad_clip_norm > 0 and norm > params.grad_clip_norm
        self._weights_are_finite = False
        clip_factor = params.grad_clip_norm / norm if clips else 1.0
        with memory_on_all_ranks(self.host_arena, self.gather):
            step(params, gradient_factor=clip_factor / params.divide_by)
        self._drop_gradients()
        self.check_weights()
        return BackendResult(
            result={
                "metrics": {"grad_norm": norm, "learning_rate": params.learning_rate},
                "trainer_step": self.trainer_step,
            }
        )

    def _load(self, call: BackendCall) -> BackendResult:
        path = call.checkpoint_path(self._checkpoint_url)
        fill_state(self.model, path, optimizer=call.params.optimizer, gather=self.gather)
        self._weights_are_finite = False
        self._gradients_pending = False
        self.model.after_load(gradients_loaded=False)
        self.check_weights()
        return BackendResult(result={"trainer_step": self.trainer_step})

    def _drop_gradients(self) -> None:
        self.model.zero_gradients()
        self._gradients_pending = False


def _inputs(batch: MicroBatch) -> dict[str, torch.Tensor]:
    if batch.per_token_BL:
        return batch.per_token_BL | batch.row_sums_B
    return dict.fromkeys(
        LOSS_ARRAYS, torch.zeros(batch.tokens_BL.shape, device=batch.tokens_BL.device)
    )


def _tokens(call: BackendCall) -> int:
    return len(call.arrays["tokens"]) if "tokens" in call.arrays else 0
