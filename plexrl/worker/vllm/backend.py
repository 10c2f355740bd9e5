"""vLLM as a rollout backend: weights in an arena, results as the wire wants them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plexrl.deployment_spec import DeploymentSpec
from plexrl.errors import InvalidRequestError
from plexrl.kv_cache import kv_token_bytes
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.keys import StateKey, StatePart, StateSlice
from plexrl.worker.arena_tensors import TORCH_DTYPES, ArenaLayout, view
from plexrl.worker.backend import BackendCall, BackendResult, Emit
from plexrl.worker.engine.backend import ARENA_DTYPES
from plexrl.worker.engine.calls import checkpoint_weights, generation_of, result_of
from plexrl.worker.engine.protocol import EngineStats
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.vllm.engine import VllmEngine
from plexrl.worker.vllm.launch import its_reasons, start_engine
from plexrl.worker.vllm.placement import Piece, watch_loading
from plexrl.worker.vllm.probe import model_logprobs, probe_tokens
from plexrl.worker.vllm.weights import ArenaWeights

if TYPE_CHECKING:
    from plexrl.statemanager.host_arena import HostArena


class VllmRolloutBackend:
    """One worker's engine. The whole model is on this worker."""

    def __init__(self, spec: DeploymentSpec, checkpoint_dir: Path) -> None:
        """Raises `InvalidRequestError` for several workers."""
        if spec.workers != 1:
            raise InvalidRequestError(
                f"backend 'vllm' runs on 1 worker, {spec.workers} were asked for: make several "
                "rollout deployments instead"
            )
        self._spec = spec
        self._checkpoint_dir = checkpoint_dir
        self._built: VllmEngine | None = None
        self._recompute_kv_on_pull = True
        self.host_arena: HostArena | None = None

    def build(self) -> None:
        """Start vLLM, lay its parameters on the arena, and check that it computes with them.

        Raises:
            InvalidRequestError: vLLM cannot run the model.
            StaleWeightsError: it computes something else than `transformers` does.
        """
        spec, dtype = self._spec, TORCH_DTYPES[ARENA_DTYPES[self._spec.dtype]]
        model = build_model(spec.model)
        model.to(dtype=dtype)
        weights = {name: parameter.data for name, parameter in named_parameters(model)}
        started = start_engine(
            model,
            dtype=dtype,
            slots=spec.max_concurrent_samples,
            sequence_tokens_max=spec.max_sequence_tokens,
            kv_token_bytes=kv_token_bytes(spec),
            kv_bytes_max=spec.kv_cache_bytes,
        )
        pieces = watch_loading(started.model, weights)
        self._lay_out(weights, pieces, dict(started.model.named_parameters()))
        self._homes = {piece.key.name: view(self.arena, piece) for piece in self._slices}
        for name, parameter in named_parameters(model):
            home = self._homes[name]
            home.copy_(parameter.data)
            # A tied weight is one parameter object, so its other uses follow.
            parameter.data = home
            parameter.requires_grad_(False)
        config: Any = model.config
        # Some kernels say no more than at their first use, which is the engine's probe.
        with its_reasons():
            self._built = VllmEngine(
                started,
                ArenaWeights(started.model, self._homes, pieces),
                ends=_token_ids(config.eos_token_id),
                sequence_tokens_max=spec.max_sequence_tokens,
                dtype=dtype,
                probe=probe_tokens(config.vocab_size, spec.max_sequence_tokens),
                wanted=lambda tokens: model_logprobs(model, tokens),
            )

    def slices(self) -> tuple[StateSlice, ...]:
        """The parameters, each whole."""
        return self._slices

    def live_parts(self) -> frozenset[StatePart]:
        """Weights are all there is; the cache is derived."""
        return frozenset({StatePart.PARAMETER})

    def before_offload(self) -> None:
        """Give the KV cache's memory back; what was being generated waits and is computed anew."""
        self.engine.drop_cache()

    def after_load(self, parts: frozenset[StatePart]) -> None:
        """Other weights may have come. Raises `StaleWeightsError` where vLLM has not got them."""
        del parts
        self.engine.weights_changed(self.engine.weights_seq)

    def after_pull(self) -> None:
        """The pulled weights draw from now on. Raises `StaleWeightsError` unless they do."""
        # A sync raises the version of a deployment by one, as every operation that changes state.
        self.engine.weights_changed(
            self.engine.weights_seq + 1, recompute_kv=self._recompute_kv_on_pull
        )

    def gather(self, value: str) -> list[str]:
        """There is one rank."""
        return [value]

    def checkpoint_extras(self, dtype: str | None) -> dict[str, bytes]:
        """No checkpoint is made of a rollout deployment."""
        del dtype
        return {}

    def run(self, call: BackendCall) -> BackendResult:
        """Load a checkpoint's weights. Raises as `Backend.run`."""
        shapes = {piece.key.name: piece.global_shape for piece in self._slices}
        found = checkpoint_weights(call, self._checkpoint_dir, shapes)
        for name, home in self._homes.items():
            home.copy_(found[name])
        self.engine.weights_changed(call.seq)
        return BackendResult()

    def submit(self, call: BackendCall, emit: Emit | None) -> None:
        """Queue a generation. Raises `BatchShapeError`, `StaleWeightsError`."""
        self.engine.submit(generation_of(call, emit))

    def abort(self, operation: str) -> None:
        """End a generation with what it has."""
        self.engine.abort(operation)

    def step(self) -> list[tuple[str, BackendResult]]:
        """One token for every running sample."""
        ended = self.engine.step()
        return [(generation.name, result_of(generation, self.stats())) for generation in ended]

    def interrupt(self, operation: str) -> BackendResult | None:
        """Take an operation out now; its result so far. None: unknown."""
        generation = self.engine.interrupt(operation)
        return None if generation is None else result_of(generation, self.stats())

    def pause(self, *, recompute_kv: bool = True) -> None:
        """Stop at the token boundary. `recompute_kv` as `RolloutBackend.pause`."""
        self._recompute_kv_on_pull = recompute_kv
        self.engine.pause()

    def resume(self) -> None:
        """Go on, with whatever weights the arena holds."""
        self.engine.resume()

    def stats(self) -> EngineStats:
        """How the engine stands."""
        return self.engine.stats()

    @property
    def has_work(self) -> bool:
        """Some generation is unfinished, and not because the engine is paused."""
        return self._built is not None and self._built.has_work

    @property
    def engine(self) -> VllmEngine:
        """What generates."""
        assert self._built is not None, "build comes first"
        return self._built

    def _lay_out(
        self,
        weights: dict[str, torch.Tensor],
        pieces: list[Piece],
        parameters: "dict[str, torch.nn.Parameter]",
    ) -> None:
        """Make the arena with vLLM's order, so that what vLLM joins lies together there."""
        layout = ArenaLayout()
        last = {piece.parameter: piece for piece in pieces}
        for piece in pieces:
            # vLLM pads a vocabulary; what it keeps behind the weight is never read.
            rest = parameters[piece.parameter].numel() - piece.start
            shape = tuple(weights[piece.name].shape)
            layout.add(
                StateKey(part=StatePart.PARAMETER, name=piece.name),
                global_shape=shape,
                offset=(0,) * len(shape),
                shape=shape,
                dtype=ARENA_DTYPES[self._spec.dtype],
                reserve=rest if piece is last[piece.parameter] else None,
            )
        self.arena = Arena(layout.nbytes)
        self._slices = tuple(layout.slices)


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
