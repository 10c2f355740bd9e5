"""The engine as a rollout backend: weights in an arena, results as the wire wants them."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plexrl.deployment_spec import DeploymentSpec
from plexrl.errors import BatchShapeError, InvalidRequestError
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.keys import StateKey, StatePart, StateSlice
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.arena_tensors import ArenaLayout, view
from plexrl.worker.backend import BackendCall, BackendResult, Emit
from plexrl.worker.checkpoint import load_hf_parameters
from plexrl.worker.engine.engine import Engine, Generation
from plexrl.worker.models import build_model, named_parameters

if TYPE_CHECKING:
    import torch

ARENA_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""A deployment's dtype, as slices spell it."""


class TorchRolloutBackend:
    """One worker's engine."""

    def __init__(self, spec: DeploymentSpec, checkpoint_dir: Path) -> None:
        if spec.workers != 1:
            raise InvalidRequestError(
                f"the torch engine runs on 1 worker, {spec.workers} were asked for: make several "
                "rollout deployments instead"
            )
        self._spec = spec
        self._checkpoint_dir = checkpoint_dir
        self._built: Engine | None = None

    def build(self) -> None:
        """Make the model with its weights in the arena, and the engine on it."""
        model = build_model(self._spec.model)
        layout = ArenaLayout()
        parameters = named_parameters(model)
        for name, parameter in parameters:
            shape = tuple(parameter.shape)
            layout.add(
                StateKey(part=StatePart.PARAMETER, name=name),
                global_shape=shape,
                offset=(0,) * len(shape),
                shape=shape,
                dtype=ARENA_DTYPES[self._spec.dtype],
            )
        self.arena = Arena(layout.nbytes)
        self._slices = tuple(layout.slices)
        self._weights: dict[str, torch.Tensor] = {}
        for (name, parameter), piece in zip(parameters, self._slices, strict=True):
            home = view(self.arena, piece)
            home.copy_(parameter.data)
            # A tied weight is one parameter object, so its other uses follow.
            parameter.data = home
            parameter.requires_grad_(False)
            self._weights[name] = home
        self._built = Engine(
            model,
            slots=self._spec.max_concurrent_samples,
            sequence_tokens_max=self._spec.max_sequence_tokens,
        )

    def slices(self) -> tuple[StateSlice, ...]:
        """The parameters."""
        return self._slices

    def live_parts(self) -> frozenset[StatePart]:
        """Weights are all there is; the cache is derived."""
        return frozenset({StatePart.PARAMETER})

    def before_offload(self) -> None:
        """Drop the KV cache."""
        self._engine.drop_cache()

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Nothing depends on former weights while the engine is idle."""
        del parts
        self._engine.drop_cache()

    def after_pull(self) -> None:
        """The cache of former weights is worth nothing."""
        self._engine.drop_cache()

    def gather(self, value: str) -> list[str]:
        """There is one rank."""
        return [value]

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        """No checkpoint is made of a rollout deployment."""
        del dtype
        return {}

    def run(self, call: BackendCall) -> BackendResult:
        """Load a checkpoint's weights. Raises as `Backend.run`."""
        if call.kind != OperationKind.LOAD_CHECKPOINT:
            raise InvalidRequestError(f"{call.kind.value} is no operation of a rollout backend")
        params: CheckpointParams = call.params
        job = params.job or str(call.rank_params["job"])
        found = load_hf_parameters(self._checkpoint_dir / job / params.name)
        for name, home in self._weights.items():
            if name not in found or found[name].shape != home.shape:
                raise BatchShapeError(
                    f"checkpoint {params.name!r} has no parameter {name!r} of shape "
                    f"{list(home.shape)}: it is of another model"
                )
        for name, home in self._weights.items():
            home.copy_(found[name])
        self._engine.drop_cache()
        return BackendResult()

    def submit(self, call: BackendCall, emit: Emit | None) -> None:
        """Queue a generation. Raises `BatchShapeError`."""
        tokens, lengths = call.arrays["tokens"], call.arrays["lengths"]
        ends = np.cumsum(lengths)[:-1]
        self._engine.submit(
            Generation(
                name=call.operation,
                prompts=[part.tolist() for part in np.split(tokens, ends)],
                samples_per_prompt=call.params.samples_per_prompt,
                sampling=call.params.sampling,
                emit=emit,
                weights_seq=call.seq,
            )
        )

    def abort(self, operation: str) -> None:
        """End a generation with what it has."""
        self._engine.abort(operation)

    def step(self) -> list[tuple[str, BackendResult]]:
        """One token for every running sample."""
        return [
            (
                generation.name,
                BackendResult(
                    result={"weights_seq": generation.weights_seq}, arrays=generation.arrays()
                ),
            )
            for generation in self._engine.step()
        ]

    @property
    def has_work(self) -> bool:
        """Some generation is unfinished."""
        return self._built is not None and self._built.has_work

    @property
    def _engine(self) -> Engine:
        assert self._built is not None, "build comes first"
        return self._built
