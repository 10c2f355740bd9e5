"""An engine as a rollout backend: weights in an arena, results in the wire format."""

from abc import abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError
from plexrl.model.architecture.families import ARCHITECTURES
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.statemanager.checkpoint.places.choice import Location
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.wire.operations import OperationKind
from plexrl.worker.interface.backend import BackendCall, BackendResult
from plexrl.worker.models import LaidOutModel, device_name, lay_out_model, named_parameters
from plexrl.worker.models.shards import box_of
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.engine.forward.joined_linear import arena_order
from plexrl.worker.rollout.engine.forward.selection import cache_size, probe
from plexrl.worker.rollout.engine.tensor_parallel import EngineCalls, LeadingEngine, RankGroup
from plexrl.worker.rollout.engine.tensor_parallel.switch_groups import SwitchGroups
from plexrl.worker.rollout.engine.tensor_parallel.switching import SwitchingEngine, SwitchingLeader
from plexrl.worker.rollout.generating_backend import EngineT, GeneratingBackend
from plexrl.worker.rollout.merged_adapters import MergedAdapters
from plexrl.worker.rollout.rollout_engine import EngineStats
from plexrl.worker.rollout.stops import TextDecoder
from plexrl.worker.state.arena_tensors import (
    ARENA_DTYPES,
    TORCH_DTYPES,
    ArenaLayout,
    ShardBox,
    span,
    view,
)
from plexrl.worker.state.checkpoint_files import load_for, recorded_trainer_step, refuse_critic
from plexrl.worker.state.device import CPU, WorkerDevice

if TYPE_CHECKING:
    import torch
    from torch import nn


class EngineBackend(GeneratingBackend[EngineT]):
    """One worker's engine. Subclasses choose the kind of engine with `_arrange` and `_start`.

    On a GPU the arena ends with a range for the KV cache. No slice refers to it, so its memory
    comes and goes with that of the weights, and its content is never copied.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        checkpoint_url: Location,
        ranks: RankGroup | None = None,
        device: WorkerDevice = CPU,
    ) -> None:
        """`ranks`: this worker's tensor-parallel group; absent: the worker has the whole model."""
        self._device = device
        self._checkpoint_url = checkpoint_url
        self._ranks = ranks
        super().__init__(spec)
        self.calls: EngineCalls | None = None
        """On the group's leader: the calls that the other ranks repeat."""
        if ranks is not None and ranks.rank == 0:
            self.calls = EngineCalls(ranks)

    def lay_out(self) -> None:
        """Make the model, and give each of its weights an address in the arena."""
        self._laid_out = self._make_model()
        self._lay_out(self._laid_out)

    def materialise(self) -> None:
        """Write the weights to the arena, and make the engine on them."""
        self._weights: dict[str, torch.Tensor] = {
            name: view(self.arena, piece) for name, piece in self._pieces_by_name.items()
        }
        for name, home in self._weights.items():
            home.copy_(self._laid_out.read(name, self._boxes[name].index))
        self._before_engine(self._laid_out)
        self._laid_out.replace_parameters(self._weights)
        if self._adapters is not None:
            self._adapters.move_in(self.arena, self._weights)
        self._laid_out.forget()
        self._engine = self._start(self._laid_out.model)
        self._engine.use_text(TextDecoder(self._spec.model))
        self._described = self._describe()
        self._leading = self._engine
        if self.calls is not None:
            self._leading = self._lead(self._engine, self.calls)

    def _lay_out(self, laid_out: LaidOutModel) -> None:
        """Reserve the arena, with a slice for each weight and adapter."""
        layout = ArenaLayout()
        self._boxes = self._arrange(laid_out.model)
        dtype = ARENA_DTYPES[self._spec.dtype]
        for name, box in self._boxes.items():
            layout.add(StateKey(part=StatePart.PARAMETER, name=name), box, dtype)
        parameter_slices = tuple(layout.slices)
        self._adapters: MergedAdapters | None = None
        if self._spec.lora is not None:
            shapes = {name: box.global_shape for name, box in self._boxes.items()}
            self._adapters = MergedAdapters(self._spec.lora, layout, shapes, dtype)
        self._cache_offset = layout.nbytes
        layout.skip(self._cache_bytes(laid_out.model), "U8")
        self.arena = self._device.make_arena(layout.nbytes)
        self._slices = tuple(layout.slices)
        self._pulled = self._slices if self._adapters is None else self._adapters.slices
        self._pieces_by_name = dict(zip(self._boxes, parameter_slices, strict=True))

    def slices(self) -> tuple[StateSlice, ...]:
        """The parameters."""
        return self._slices

    def pulled_slices(self) -> tuple[StateSlice, ...]:
        """All parameters, or only the adapters, from which the weights are recomputed."""
        return self._pulled

    def before_offload(self) -> None:
        """Drop the KV cache. Samples of a paused engine wait and are recomputed."""
        self.engine.drop_cache()

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Drop the KV cache, which belongs to the previous weights."""
        del parts
        self.engine.drop_cache()

    def after_pull(self, *, seq: int, trainer_step: int) -> None:
        """Use the pulled weights, also for the samples of a paused engine."""
        if self._adapters is not None:
            self._adapters.merge()
        super().after_pull(seq=seq, trainer_step=trainer_step)

    def gather(self, value: str) -> list[str]:
        """All-gather of one string per rank, in rank order."""
        return [value] if self._ranks is None else self._ranks.gather(value)

    def run(self, call: BackendCall) -> BackendResult:
        """Load a checkpoint's weights. Raises as `Backend.run`."""
        if call.kind != OperationKind.LOAD_CHECKPOINT:
            raise InvalidRequestError(f"{call.kind.value} is no operation of a rollout backend")
        path = call.checkpoint_path(self._checkpoint_url)
        refuse_critic(path, self._spec.model)
        found = load_for(path, self._pulled)
        for piece in self._pulled:
            view(self.arena, piece).copy_(found[piece])
        if self._adapters is not None:
            self._adapters.merge()
        trainer_step = recorded_trainer_step(path)
        self._note_step(call.seq, trainer_step)
        self.engine.weights_changed(call.seq)
        return BackendResult(result={"trainer_step": trainer_step})

    def _describe(self) -> dict[str, Any]:
        """The properties that the times of this engine depend on, beside the sizes of its
        groups."""
        model, stats = self._spec.model, self.stats()
        sizes = " ".join(f"{name}={size}" for name, size in asdict(model.dimensions).items())
        return {
            "model": f"{model.model_type} {sizes}",
            "dtype": self._spec.dtype,
            "device": device_name(next(iter(self._weights.values())).device),
            "kv_token_bytes": stats.block_bytes * self._spec.layout.tp // stats.block_tokens,
        }

    def _make_model(self) -> LaidOutModel:
        """The model, before its parameters have their addresses."""
        return lay_out_model(self._spec.model)

    def _before_engine(self, laid_out: LaidOutModel) -> None:
        """Hook after the weights were written, while the model still has its own parameters."""

    @abstractmethod
    def _arrange(self, model: "nn.Module") -> dict[str, ShardBox]:
        """This rank's boxes of the model's parameters, by name, in arena order."""

    def _cache_bytes(self, model: "nn.Module") -> int:
        """Memory to reserve in the arena for the KV cache. The model may be on `meta`."""
        del model
        return 0

    @abstractmethod
    def _start(self, model: "nn.Module") -> EngineT:
        """The engine, on a model whose weights are in the arena."""

    def _lead(self, engine: EngineT, calls: EngineCalls) -> LeadingEngine:
        """On the leader of several ranks: the engine and the calls that the others repeat."""
        return LeadingEngine(engine, calls)

    @property
    def ranks(self) -> RankGroup | None:
        """This worker's tensor-parallel group; None: the worker has the whole model."""
        return self._ranks


class TorchRolloutBackend(EngineBackend[Engine | SwitchingEngine]):
    """The built-in engine."""

    def __init__(
        self,
        spec: DeploymentSpec,
        checkpoint_url: Location,
        ranks: RankGroup | None = None,
        groups: SwitchGroups | None = None,
        device: WorkerDevice = CPU,
    ) -> None:
        """As `EngineBackend`. `groups`: this worker's groups in an engine with `spec.tp_sizes`,
        instead of `ranks`."""
        everyone = ranks if groups is None else groups.everyone
        super().__init__(spec, checkpoint_url, everyone, device)
        self._groups = groups

    def _arrange(self, model: "nn.Module") -> dict[str, ShardBox]:
        named = dict(named_parameters(model))
        share = (0, 1) if self._ranks is None else (self._ranks.share, self._ranks.shares)
        return {name: box_of(name, tuple(named[name].shape), *share) for name in arena_order(named)}

    def _before_engine(self, laid_out: LaidOutModel) -> None:
        # Other models may use a module's parameters without calling the module.
        at_once = laid_out.model.config.model_type not in ARCHITECTURES
        with laid_out.streamed(at_once=at_once):
            self._probed = probe(laid_out.model)

    def _cache_bytes(self, model: "nn.Module") -> int:
        if not self._device.uuid:
            # Pages of the CPU are taken as the cache fills.
            return 0
        spec, groups = self._spec, self._groups
        engines = 1 if groups is None else groups.count(groups.smallest)
        return cache_size(
            model,
            TORCH_DTYPES[ARENA_DTYPES[spec.dtype]],
            tp=spec.shares,
            slots=-(-spec.max_concurrent_samples // engines),
            sequence_tokens_max=spec.max_sequence_tokens,
            kv_bytes_max=spec.kv_cache_bytes,
        ).nbytes

    def _start(self, model: "nn.Module") -> Engine | SwitchingEngine:
        nbytes = self._cache_bytes(model)
        memory = span(self.arena, self._cache_offset, nbytes, "U8") if nbytes else None
        capture = self._device.step_capture() if self._spec.cuda_graphs else None
        if self._groups is not None:
            return SwitchingEngine(
                model,
                groups=self._groups,
                slots=self._spec.max_concurrent_samples,
                sequence_tokens_max=self._spec.max_sequence_tokens,
                kv_bytes_max=self._spec.kv_cache_bytes,
                probed=self._probed,
                cache_memory=memory,
                capture=capture,
            )
        return Engine(
            model,
            slots=self._spec.max_concurrent_samples,
            sequence_tokens_max=self._spec.max_sequence_tokens,
            kv_bytes_max=self._spec.kv_cache_bytes,
            ranks=self._ranks,
            probed=self._probed,
            cache_memory=memory,
            capture=capture,
        )

    def set_tp(self, tp: int, kv: str) -> EngineStats:
        if not isinstance(self._leading, SwitchingLeader):
            return super().set_tp(tp, kv)
        self._leading.set_tp(tp, kv)
        return self.stats()

    def _lead(self, engine: Engine | SwitchingEngine, calls: EngineCalls) -> LeadingEngine:
        if isinstance(engine, SwitchingEngine):
            return SwitchingLeader(engine, calls)
        return LeadingEngine(engine, calls)
