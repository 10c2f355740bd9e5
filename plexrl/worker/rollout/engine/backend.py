"""The engine as a rollout backend: weights in an arena, results as the wire wants them."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from plexrl.errors import BatchShapeError, InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.wire.operations import CheckpointParams, OperationKind
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.process.backend import BackendCall, BackendResult, Emit
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.engine.passes.choice import probe
from plexrl.worker.rollout.engine.passes.joined_linear import arena_order
from plexrl.worker.rollout.engine.tensor_parallel import LeadingEngine, Orders, RankGroup
from plexrl.worker.rollout.generation import Generation
from plexrl.worker.rollout.merged_adapters import MergedAdapters
from plexrl.worker.rollout.protocol import EngineStats, RolloutEngine
from plexrl.worker.rollout.shards import Box, box_of
from plexrl.worker.state.arena_tensors import ArenaLayout, view
from plexrl.worker.state.checkpoint import load_hf_parameters, recorded_trainer_step

if TYPE_CHECKING:
    import torch
    from torch import nn

    from plexrl.statemanager.client.host_arena import HostArena

ARENA_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
"""A deployment's dtype, as slices spell it."""


Made = TypeVar("Made", bound=RolloutEngine)
"""The kind of engine that a backend makes."""


class EngineBackend(ABC, Generic[Made]):
    """One worker's engine, of whatever kind; what makes it one of a kind is in `_arrange` and
    `_start`."""

    def __init__(
        self, spec: DeploymentSpec, checkpoint_dir: Path, ranks: RankGroup | None = None
    ) -> None:
        """`ranks`: the tensor-parallel group that this worker is one of; absent: it is alone."""
        self._spec = spec
        self._checkpoint_dir = checkpoint_dir
        self._ranks = ranks
        self._built: Made | None = None
        self.orders: Orders | None = None
        """Of the group's leader: what the other ranks do is told by it."""
        if ranks is not None and ranks.rank == 0:
            self.orders = Orders(ranks)
        self._recompute_kv_on_pull = True
        self._trainer_steps: dict[int, int] = {}
        """Steps of the trainer's optimizer in each version that draws, or has drawn for what is
        unfinished."""
        self._begun: dict[str, int] = {}
        """The version that each unfinished generation began with."""

    def build(self) -> None:
        """Make the model with its weights in the arena, and the engine on it."""
        model = build_model(self._spec.model)
        layout = ArenaLayout()
        self._boxes: dict[str, Box] = {}
        named = dict(named_parameters(model))
        places = self._arrange(model)
        parameters = [(name, named[name]) for name in places]
        for name, parameter in parameters:
            shape = tuple(parameter.shape)
            self._boxes[name] = box = self._box(name, shape)
            layout.add(
                StateKey(part=StatePart.PARAMETER, name=name),
                global_shape=shape,
                offset=box.offset,
                shape=box.shape,
                dtype=ARENA_DTYPES[self._spec.dtype],
                reserve=places[name],
            )
        parameter_slices = tuple(layout.slices)
        self._adapters: MergedAdapters | None = None
        if self._spec.lora is not None:
            shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
            dtype = ARENA_DTYPES[self._spec.dtype]
            self._adapters = MergedAdapters(self._spec.lora, layout, shapes, dtype)
        self.arena = Arena(layout.nbytes)
        self.host_arena: HostArena | None = None
        self._slices = tuple(layout.slices)
        self._pulled = self._slices if self._adapters is None else self._adapters.slices
        self._weights: dict[str, torch.Tensor] = {}
        for (name, parameter), piece in zip(parameters, parameter_slices, strict=True):
            home = view(self.arena, piece)
            home.copy_(parameter.data[self._boxes[name].index])
            # A tied weight is one parameter object, so its other uses follow.
            parameter.data = home
            parameter.requires_grad_(False)
            self._weights[name] = home
        if self._adapters is not None:
            self._adapters.move_in(self.arena, self._weights)
        self._built = self._start(model)
        self._lead: RolloutEngine = self._built
        if self.orders is not None:
            self._lead = LeadingEngine(self._built, self.orders)

    def slices(self) -> tuple[StateSlice, ...]:
        """The parameters."""
        return self._slices

    def pulled_slices(self) -> tuple[StateSlice, ...]:
        """What a weight sync brings: all, or the adapters that the rest is made of."""
        return self._pulled

    def live_parts(self) -> frozenset[StatePart]:
        """Weights are all there is, and what adapters are added to; the cache is derived."""
        return frozenset(piece.key.part for piece in self._slices)

    def before_offload(self) -> None:
        """Drop the KV cache; what a paused engine was generating waits and is computed anew."""
        self.engine.drop_cache()

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """The cache of former weights is worth nothing."""
        del parts
        self.engine.drop_cache()

    def after_pull(self, *, seq: int, trainer_step: int) -> None:
        """The pulled weights draw from now on, for what a paused engine was generating too."""
        if self._adapters is not None:
            self._adapters.merge()
        self._note_step(seq, trainer_step)
        self.engine.weights_changed(seq, recompute_kv=self._recompute_kv_on_pull)

    def gather(self, value: str) -> list[str]:
        """Every rank's value, by rank."""
        return [value] if self._ranks is None else self._ranks.gather(value)

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
        shapes = {piece.key.name: piece.global_shape for piece in self._pulled}
        for name, shape in shapes.items():
            if name not in found or tuple(found[name].shape) != shape:
                raise BatchShapeError(
                    f"checkpoint {params.name!r} has no parameter {name!r} of shape "
                    f"{list(shape)}: it is of another model"
                )
        if self._adapters is None:
            for name, home in self._weights.items():
                home.copy_(found[name][self._boxes[name].index])
        else:
            for piece in self._pulled:
                view(self.arena, piece).copy_(found[piece.key.name])
            self._adapters.merge()
        trainer_step = recorded_trainer_step(self._checkpoint_dir / job / params.name)
        self._note_step(call.seq, trainer_step)
        self.engine.weights_changed(call.seq)
        return BackendResult(result={"trainer_step": trainer_step})

    def submit(self, call: BackendCall, emit: Emit | None) -> None:
        """Queue a generation. Raises `BatchShapeError`."""
        tokens, lengths = call.arrays["tokens"], call.arrays["lengths"]
        ends = np.cumsum(lengths)[:-1]
        self._lead.submit(
            Generation(
                name=call.operation,
                prompts=[part.tolist() for part in np.split(tokens, ends)],
                samples_per_prompt=call.params.samples_per_prompt,
                sampling=call.params.sampling,
                emit=emit,
                weights_seq=call.seq,
                first_row=int(call.rank_params.get("first_row", 0)),
            )
        )
        self._trainer_steps.setdefault(call.seq, call.trainer_step)
        self._begun[call.operation] = call.seq

    def abort(self, operation: str) -> None:
        """End a generation with what it has."""
        self._lead.abort(operation)

    def step(self) -> list[tuple[str, BackendResult]]:
        """One token for every running sample."""
        return [(generation.name, self._result(generation)) for generation in self._lead.step()]

    def interrupt(self, operation: str) -> BackendResult | None:
        """Take an operation out now; its result so far. None: unknown."""
        generation = self._lead.interrupt(operation)
        return None if generation is None else self._result(generation)

    def pause(self, *, recompute_kv: bool = True) -> None:
        """Stop at the token boundary: weights may be pulled, or the state offloaded.

        `recompute_kv` says what a pull does with the cache of samples under way.
        """
        self._recompute_kv_on_pull = recompute_kv
        self._lead.pause()

    def resume(self) -> None:
        """Go on, with whatever weights the arena holds."""
        self._lead.resume()

    def stats(self) -> EngineStats:
        """How the engine stands."""
        return self.engine.stats()

    @property
    def has_work(self) -> bool:
        """Some generation is unfinished, and not because the engine is paused."""
        return self._built is not None and self._built.has_work

    @abstractmethod
    def _arrange(self, model: "nn.Module") -> dict[str, int | None]:
        """The model's parameters by name, in the arena's order; elements that are kept free for
        one where that is more than it has."""

    @abstractmethod
    def _start(self, model: "nn.Module") -> Made:
        """The engine, on a model whose weights are in the arena now."""

    def _result(self, generation: Generation) -> BackendResult:
        """`segments` lists `[row, start, weights_seq, trainer_step]` of rows that other versions
        drew."""
        stats = self.engine.stats()
        metrics = {
            "preemptions": generation.preemptions,
            "kv_cache_bytes": stats.kv_bytes_max,
            "kv_cache_bytes_used_max": generation.blocks_max * stats.block_bytes,
        }
        result: dict[str, Any] = {
            "weights_seq": generation.weights_seq,
            "trainer_step": self._trainer_steps[generation.weights_seq],
            "metrics": metrics,
        }
        if mixed := generation.mixed_segments():
            result["segments"] = [
                [row, start, seq, self._trainer_steps[seq]] for row, start, seq in mixed
            ]
        self._begun.pop(generation.name, None)
        return BackendResult(result=result, arrays=generation.arrays())

    def _note_step(self, seq: int, trainer_step: int) -> None:
        """Version `seq` draws from now on. What drew nothing that is unfinished is forgotten."""
        oldest = min(self._begun.values(), default=seq)
        kept = {old: step for old, step in self._trainer_steps.items() if old >= oldest}
        self._trainer_steps = {**kept, seq: trainer_step}

    def _box(self, name: str, shape: tuple[int, ...]) -> Box:
        if self._ranks is None:
            return box_of(name, shape, 0, 1)
        return box_of(name, shape, self._ranks.rank, self._ranks.ranks)

    @property
    def ranks(self) -> RankGroup | None:
        """The tensor-parallel group that this worker is one of; None: it is alone."""
        return self._ranks

    @property
    def engine(self) -> Made:
        """This rank's own part of what generates."""
        assert self._built is not None, "build comes first"
        return self._built


class TorchRolloutBackend(EngineBackend[Engine]):
    """The built-in engine."""

    def _arrange(self, model: "nn.Module") -> dict[str, int | None]:
        self._probed = probe(model)
        return dict.fromkeys(arena_order(dict(named_parameters(model))))

    def _start(self, model: "nn.Module") -> Engine:
        return Engine(
            model,
            slots=self._spec.max_concurrent_samples,
            sequence_tokens_max=self._spec.max_sequence_tokens,
            kv_bytes_max=self._spec.kv_cache_bytes,
            ranks=self._ranks,
            probed=self._probed,
        )
