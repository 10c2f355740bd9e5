"""The `fsdp` training backend: torch FSDP2 with all its state in one arena.

The arena has a region for each kind of state (parameters, gradients, first and second moments),
laid out alike, and the optimizer's step count behind them. FSDP gathers from and reduces into
views of it. With a host optimizer the moments and the count are in host memory instead
(`plexrl.worker.host_optimizer`). AdamW is elementwise, so each rank steps its own region as one
flat tensor, whatever parameter a byte belongs to; the padding between parameters stays zero under
it.
"""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from plexrl.deployment_spec import DeploymentSpec
from plexrl.errors import InvalidRequestError, NonFiniteGradientError
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.host_arena import HostArena
from plexrl.statemanager.host_requests import host_start
from plexrl.statemanager.keys import ARENA_ALIGNMENT, StateKey, StatePart, StateSlice
from plexrl.wire.operations import AdamParams, CheckpointParams, OperationKind
from plexrl.worker.arena_tensors import ArenaLayout, span, view
from plexrl.worker.backend import BackendCall, BackendResult
from plexrl.worker.checkpoint import fill_from_checkpoint, model_files
from plexrl.worker.host_optimizer import HostAdamW, floats
from plexrl.worker.host_transfer import Run
from plexrl.worker.losses import compute_loss
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.packing import MicroBatch, micro_batches, unpack

LAYERWISE_PARAMETERS = 50_000_000
"""A model with fewer is gathered at once: going layer by layer would cost more than it saves."""

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Region:
    """One kind of state of all parameters, in parameter order."""

    start: int
    """Bytes into the arena."""
    elements: int
    slices: dict[str, StateSlice]


class FsdpBackend:
    """One rank. The default process group must exist before `build`."""

    def __init__(
        self, spec: DeploymentSpec, rank: int, world_size: int, checkpoint_dir: Path
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._checkpoint_dir = checkpoint_dir
        self._gradients_pending = False

    def build(self) -> None:
        """Make the model, shard it and move its state into the arena."""
        model = build_model(self._spec.model)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        if sum(p.numel() for p in model.parameters()) >= LAYERWISE_PARAMETERS:
            for layer in model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer)
        fully_shard(model)
        assert isinstance(model, FSDPModule)
        self._model = model
        shards = {name: _fsdp_param(model, p) for name, p in named_parameters(model)}
        self._lay_out(shards)
        self._move_in(shards)
        if self.host_arena is None:
            self._optimizer = self._make_optimizer()
        else:
            self._host_optimizer = self._make_host_optimizer(self.host_arena)

    def slices(self) -> tuple[StateSlice, ...]:
        """All state, in arena order."""
        return (*self._layout.slices, *self._host_slices)

    def live_parts(self) -> frozenset[StatePart]:
        """Gradients count only while they wait for a step."""
        parts = {StatePart.PARAMETER, StatePart.OPTIMIZER}
        if self._gradients_pending:
            parts.add(StatePart.GRADIENT)
        return frozenset(parts)

    def before_offload(self) -> None:
        """Free the gathered parameters."""
        self._model.reshard()

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Gradients that were not stored are zero, as given-back memory is."""
        self._gradients_pending = StatePart.GRADIENT in parts
        if not self._gradients_pending:
            self._flat["grad"].zero_()

    def after_pull(self) -> None:
        """Training parameters are never pulled."""
        raise InvalidRequestError("a train deployment publishes weights; it does not pull them")

    def gather(self, value: str) -> list[str]:
        """Over the process group."""
        found = [""] * self._world_size
        dist.all_gather_object(found, value)
        return found

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        """Configuration and tokenizer."""
        config = copy.deepcopy(self._model.config)
        config.dtype = getattr(torch, dtype or "float32")
        generation = getattr(self._model, "generation_config", None)
        return model_files(self._spec.model, config, generation)

    def run(self, call: BackendCall) -> BackendResult:
        """Carry out one operation. Raises as `Backend.run`."""
        match call.kind:
            case OperationKind.FORWARD:
                return self._forward(call)
            case OperationKind.FORWARD_BACKWARD:
                return self._forward_backward(call)
            case OperationKind.OPTIM_STEP:
                return self._optim_step(call.params)
            case OperationKind.LOAD_CHECKPOINT:
                return self._load(call.params, str(call.rank_params["job"]))
            case _:
                raise InvalidRequestError(f"{call.kind.value} is no operation of a train backend")

    # Operations

    def _forward(self, call: BackendCall) -> BackendResult:
        batches = micro_batches(call.arrays, int(call.rank_params["micro_batches"]))
        with torch.no_grad():
            values = [self._logprobs(batch) for batch in batches]
        self._model.reshard()
        return BackendResult(arrays={"logprobs": unpack(batches, values, _tokens(call))})

    def _forward_backward(self, call: BackendCall) -> BackendResult:
        batches = micro_batches(call.arrays, int(call.rank_params["micro_batches"]))
        denominator = float(call.rank_params["denominator"])
        values: list[torch.Tensor] = []
        sums: dict[str, float] = {"loss": 0.0}
        for batch in batches:
            logprobs_BL = self._logprobs(batch)
            found = compute_loss(call.params.loss, logprobs_BL, self._inputs(batch), denominator)
            # FSDP averages gradients over ranks; the loss is a sum over them.
            (found.loss * self._world_size).backward()  # type: ignore[no-untyped-call]
            values.append(logprobs_BL.detach())
            sums["loss"] += float(found.loss.detach())
            for name, value in found.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        self._gradients_pending = True
        self._model.reshard()
        return BackendResult(
            result={"sums": sums, "maxes": {}},
            arrays={"logprobs": unpack(batches, values, _tokens(call))},
        )

    def _optim_step(self, params: AdamParams) -> BackendResult:
        gradient = self._flat["grad"]
        squared = gradient.square().sum()
        dist.all_reduce(squared)
        norm = float(squared.sqrt())
        if not math.isfinite(norm):
            gradient.zero_()
            self._gradients_pending = False
            # Dropping gradients is a mutation like any other: it must be replayed in its place, so
            # the operation finishes, and its answer is the error.
            refusal = NonFiniteGradientError(
                f"the gradient norm is {norm}: the gradients were dropped and the parameters are "
                "as before; look for extreme advantages, logprobs or learning rates"
            )
            return BackendResult(result={"error": refusal.to_wire()})
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            gradient.mul_(params.grad_clip_norm / norm)
        if self.host_arena is None:
            self._step_on_device(params)
        else:
            self._host_optimizer.step(params)
        gradient.zero_()
        self._gradients_pending = False
        return BackendResult(
            result={"metrics": {"grad_norm": norm, "learning_rate": params.learning_rate}}
        )

    def _step_on_device(self, params: AdamParams) -> None:
        group = self._optimizer.param_groups[0]
        group["lr"] = params.learning_rate
        group["betas"] = (params.beta1, params.beta2)
        group["eps"] = params.eps
        group["weight_decay"] = params.weight_decay
        self._optimizer.step()

    def _load(self, params: CheckpointParams, job: str) -> BackendResult:
        parts = {StatePart.PARAMETER} | ({StatePart.OPTIMIZER} if params.optimizer else set())
        wants = [piece for piece in self.slices() if piece.key.part in parts]
        path = self._checkpoint_dir / (params.job or job) / params.name
        if self.host_arena is None:
            fill_from_checkpoint(path, wants, self._memory_of, self.gather)
            if not params.optimizer:
                view(self.arena, self._step_slice).zero_()
                for name in MOMENTS:
                    self._flat[name].zero_()
        else:
            self._load_with_host(self.host_arena, path, wants)
        self._flat["grad"].zero_()
        self._gradients_pending = False
        return BackendResult(result={})

    def _load_with_host(self, host: HostArena, path: Path, wants: list[StateSlice]) -> None:
        with host.writing() as at:
            whole = floats(at.target, host.nbytes).view(torch.uint8).numpy()
            if at.copies:
                # What lies between slices is zero too, and stays so under every step.
                whole.fill(0)

            def memory(piece: StateSlice) -> memoryview:
                if piece.arena_offset < self._host_start:
                    return self._memory_of(piece)
                first = piece.arena_offset - self._host_start
                return memoryview(whole.data)[first : first + piece.nbytes]

            fill_from_checkpoint(path, wants, memory, self.gather)
            if all(piece.key.part != StatePart.OPTIMIZER for piece in wants):
                whole.fill(0)

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Logprob of every token given those before it, float32 `[B, L]`; column 0 is 0."""
        logits_BLV = self._model(
            input_ids=batch.tokens_BL, attention_mask=batch.valid_BL.long(), use_cache=False
        ).logits
        predicted_BLV = logits_BLV[:, :-1].float()
        chosen_BL1 = predicted_BLV.gather(-1, batch.tokens_BL[:, 1:, None])
        logprobs_BL = chosen_BL1.squeeze(-1) - predicted_BLV.logsumexp(-1)
        return nn.functional.pad(logprobs_BL * batch.valid_BL[:, 1:], (1, 0))

    def _inputs(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        if batch.per_token_BL:
            return batch.per_token_BL
        zeros = torch.zeros(batch.tokens_BL.shape)
        names = ("mask", "weights", "logprobs", "advantages", "ref_logprobs")
        return dict.fromkeys(names, zeros)

    # State

    def _lay_out(self, shards: dict[str, Any]) -> None:
        self._layout = ArenaLayout()
        self._regions: dict[str, _Region] = {}
        for region, part in (("param", StatePart.PARAMETER), ("grad", StatePart.GRADIENT)):
            self._add_region(self._layout, region, part, shards)
        in_host = self._spec.optimizer == "host"
        layout = ArenaLayout(host_start(self._layout.nbytes)) if in_host else self._layout
        for moment in MOMENTS:
            self._add_region(layout, moment, StatePart.OPTIMIZER, shards)
        self._step_slice = layout.add(
            StateKey(part=StatePart.OPTIMIZER, name="step"), global_shape=(), offset=(), shape=()
        )
        self.arena = Arena(self._layout.nbytes)
        self._host_start = host_start(self._layout.nbytes)
        self._host_slices = layout.slices if in_host else []
        self.host_arena = HostArena(layout.nbytes - self._host_start) if in_host else None

    def _add_region(
        self, layout: ArenaLayout, region: str, part: StatePart, shards: dict[str, Any]
    ) -> None:
        start = layout.nbytes
        suffix = f"/{region}" if part == StatePart.OPTIMIZER else ""
        placed = {
            name: self._add(layout, StateKey(part=part, name=name + suffix), shard)
            for name, shard in shards.items()
        }
        self._regions[region] = _Region(start, (layout.nbytes - start) // 4, placed)

    def _add(self, layout: ArenaLayout, key: StateKey, shard: Any) -> StateSlice:
        parameter: DTensor = shard.sharded_param
        local = parameter._local_tensor
        padded = shard.padded_sharded_param_size
        start = min(self._rank * padded[0], parameter.shape[0])
        return layout.add(
            key,
            global_shape=tuple(parameter.shape),
            offset=(start, *(0 for _ in parameter.shape[1:])),
            shape=(tuple(local.shape) if local.numel() else (0, *parameter.shape[1:])),
            # FSDP's padding has no moments, so that host memory is one extent of a version.
            reserve=math.prod(padded) if layout is self._layout else None,
        )

    def _move_in(self, shards: dict[str, Any]) -> None:
        """Have FSDP keep each shard in the arena.

        FSDP2 reads a shard through two references: the padded flat data that it gathers from, and
        the local tensor of the parameter. Both are pointed at the arena; FSDP's own check that they
        share a storage then holds, so it never copies them elsewhere.
        """
        self._flat = {
            name: span(self.arena, region.start, region.elements)
            for name, region in self._regions.items()
            if region.start < self._host_start
        }
        with torch.no_grad():
            for name, shard in shards.items():
                piece = self._regions["param"].slices[name]
                padded = shard.padded_sharded_param_size
                home = span(self.arena, piece.arena_offset, math.prod(padded))
                home.copy_(shard._sharded_param_data)
                shard._sharded_param_data = home
                parameter = shard.sharded_param
                parameter._local_tensor = home.view(padded).narrow(0, 0, piece.shape[0])
                gradient = self._regions["grad"].slices[name]
                parameter.grad = self._as_dtensor(parameter, view(self.arena, gradient))

    def _make_optimizer(self) -> torch.optim.AdamW:
        flat = nn.Parameter(self._flat["param"])
        flat.grad = self._flat["grad"]
        optimizer = torch.optim.AdamW([flat], fused=True)
        step = view(self.arena, self._step_slice)
        optimizer.state[flat] = {"step": step, **{name: self._flat[name] for name in MOMENTS}}
        return optimizer

    def _make_host_optimizer(self, host: HostArena) -> HostAdamW:
        first, second = (self._regions[name] for name in MOMENTS)
        return HostAdamW(
            host,
            self._runs(first),
            moments=(self._in_host(first.start), self._in_host(second.start)),
            step=self._in_host(self._step_slice.arena_offset),
        )

    def _runs(self, moment: _Region) -> list[Run]:
        """What of the parameters lies in a row among the moments too."""
        found: list[tuple[int, int, int]] = []
        for name, piece in self._regions["param"].slices.items():
            first = (piece.arena_offset - self._regions["param"].start) // 4
            kept = moment.slices[name]
            place = (kept.arena_offset - moment.start) // 4
            count = -(-kept.nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT // 4
            if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (
                first,
                place,
            ):
                first, place, count = (*found[-1][:2], found.pop()[2] + count)
            if count:
                found.append((first, place, count))
        return [
            Run(
                self._flat["param"][first : first + count],
                self._flat["grad"][first : first + count],
                place,
            )
            for first, place, count in found
        ]

    def _in_host(self, place: int) -> int:
        """In elements of host memory."""
        return (place - self._host_start) // 4

    def _memory_of(self, piece: StateSlice) -> memoryview:
        return self.arena.buffer[piece.arena_offset : piece.arena_offset + piece.nbytes]

    def _as_dtensor(self, like: Any, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            like.device_mesh,
            [Shard(0)],
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def _fsdp_param(model: nn.Module, parameter: nn.Parameter) -> Any:
    """FSDP2's record of a sharded parameter."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        for shard in group.fsdp_params if group is not None else ():
            if shard.sharded_param is parameter:
                return shard
    raise AssertionError("a parameter that FSDP does not shard")


def _tokens(call: BackendCall) -> int:
    return len(call.arrays["tokens"]) if "tokens" in call.arrays else 0
