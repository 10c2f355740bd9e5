"""The `torch` backend of forward deployments: a reference, a teacher, a reward model,
a critic that is not trained.

The state is the weights alone. Every rank has all weights and computes the rows that the dispatch
plan gives it, so ranks never wait for each other. The StateManager stores equal replicas once. It
does not store unchanged weights again, so an offload of such a model copies nothing. Its decoder
layers may stay in host memory (`plexrl.worker.forward.hosted_layers`).

Shapes: B rows of a micro-batch, L its longest row, V vocabulary, H hidden size.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.checkpoint.places.choice import Location
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.wire.operations import ForwardParams, OperationKind
from plexrl.worker.batches.logprobs import TokenValues, wanted_by_forward
from plexrl.worker.batches.packing import MicroBatch, micro_batches, unpack_named, unpack_rows
from plexrl.worker.batches.results import named_on_cpu, on_cpu
from plexrl.worker.batches.values import outputs_of_tokens
from plexrl.worker.forward.hosted_layers import ModelMemory
from plexrl.worker.interface.backend import Backend, BackendCall, BackendResult
from plexrl.worker.models import lay_out_model
from plexrl.worker.state.arena_tensors import ARENA_DTYPES
from plexrl.worker.state.checkpoint_files import load_for, recorded_trainer_step, refuse_critic
from plexrl.worker.state.device import CPU, WorkerDevice
from plexrl.worker.state.rank_agreement import on_all_ranks


class ForwardMemory(Protocol):
    """One rank's weights."""

    arena: WorkerArena
    host_arena: HostArena | None
    slices: tuple[StateSlice, ...]

    def materialise(self) -> None:
        """Write the weights to the arena, which has memory from now on."""
        ...

    def write(self, values: Mapping[StateSlice, torch.Tensor]) -> None:
        """Replace all weights, by slice."""
        ...


class ForwardBackend(Backend):
    """One rank. With several ranks, the default process group must exist before `gather`."""

    def __init__(
        self,
        spec: DeploymentSpec,
        rank: int,
        world_size: int,
        checkpoint_url: Location,
        device: WorkerDevice = CPU,
    ) -> None:
        self._device = device
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._checkpoint_url = checkpoint_url
        self._memory: ForwardMemory

    def lay_out(self) -> None:
        """Make the model, and give each of its weights an address."""
        laid_out = lay_out_model(self._spec.model)
        self._model = laid_out.model
        self._memory = ModelMemory(
            laid_out,
            dtype=ARENA_DTYPES[self._spec.dtype],
            layers_on_device=self._spec.layers_on_device,
            device=self._device,
        )
        self.arena, self.host_arena = self._memory.arena, self._memory.host_arena

    def materialise(self) -> None:
        """Write the weights to the arena."""
        self._memory.materialise()

    def slices(self) -> tuple[StateSlice, ...]:
        """The parameters."""
        return self._memory.slices

    def gather(self, value: str) -> list[str]:
        """All-gather over the process group."""
        if self._world_size == 1:
            return [value]
        found = [""] * self._world_size
        dist.all_gather_object(found, value)
        return found

    def run(self, call: BackendCall) -> BackendResult:
        """Carry out a forward or load_checkpoint. Raises as `Backend.run`."""
        match call.kind:
            case OperationKind.FORWARD:
                return self._forward(call)
            case OperationKind.LOAD_CHECKPOINT:
                return self._load(call.checkpoint_path(self._checkpoint_url))
            case _:
                raise InvalidRequestError(f"{call.kind.value} is no operation of a forward backend")

    def _forward(self, call: BackendCall) -> BackendResult:
        batches = [
            batch.placed(self._device.place)
            for batch in micro_batches(call.arrays, call.share.micro_batches)
        ]
        with torch.inference_mode():
            if self._spec.model.head == "reward":
                scores = [self._scores(batch) for batch in batches]
                return BackendResult(arrays={"scores": unpack_rows(call.arrays, on_cpu(scores))})
            values = [self._values(batch, call.params) for batch in batches]
        tokens = len(call.arrays["tokens"]) if "tokens" in call.arrays else 0
        return BackendResult(arrays=unpack_named(batches, named_on_cpu(values), tokens))

    def _values(self, batch: MicroBatch, params: ForwardParams) -> TokenValues:
        outputs = self._model(**batch.model_inputs).logits
        return outputs_of_tokens(self._spec.model, outputs, batch, wanted_by_forward(params))

    def _scores(self, batch: MicroBatch) -> torch.Tensor:
        """The score of every row's last hidden state, float32 `[B]`.

        `transformers` scores the last token that is not the padding token. Here the row's length is
        known, so a row that ends with the padding token is scored at its true end.
        """
        model: Any = self._model
        decoder = getattr(model, model.base_model_prefix)
        hidden_BLH = decoder(**batch.model_inputs).last_hidden_state
        last_B = (batch.valid_BL.sum(1) - 1).clamp(min=0)
        rows_B = torch.arange(batch.rows, device=last_B.device)
        return model.score(hidden_BLH[rows_B, last_B]).squeeze(-1).float()  # type: ignore[no-any-return]

    def _load(self, path: Location) -> BackendResult:
        read: dict[StateSlice, torch.Tensor] = {}

        def read_all() -> str:
            refuse_critic(path, self._spec.model)
            read.update(load_for(path, self._memory.slices))
            return ""

        on_all_ranks(self.gather, read_all)
        self._memory.write(read)
        return BackendResult(result={"trainer_step": recorded_trainer_step(path)})
