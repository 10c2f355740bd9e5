"""The part of a rollout backend that is the same for every engine: calls in, results out."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.wire.operations import PROMPT_SAMPLING
from plexrl.worker.interface.backend import (
    BackendCall,
    BackendResult,
    Emit,
    EmitRow,
    RolloutBackend,
)
from plexrl.worker.rollout.generation import Generation
from plexrl.worker.rollout.rollout_engine import EngineStats, RolloutEngine

if TYPE_CHECKING:
    from plexrl.worker.rollout.engine.tensor_parallel import LeadingEngine

EngineT = TypeVar("EngineT", bound=RolloutEngine)


class GeneratingBackend(RolloutBackend, Generic[EngineT]):
    """Turns calls into generations of an engine, and what the engine drew into results.

    A subclass makes the engine: it sets `_engine`, `_leading` and `_described`.
    """

    _leading: "EngineT | LeadingEngine"
    """The engine, or the calls to it that other ranks repeat."""
    _described: dict[str, Any]
    """The properties that the times of the engine depend on, beside the sizes of its groups."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self._spec = spec
        self._engine: EngineT | None = None
        self._recompute_kv_on_pull = True
        self._trainer_steps: dict[int, int] = {}
        """Optimizer steps in each version of the weights that unfinished generations use."""
        self._begun: dict[str, Generation] = {}
        """Unfinished generations."""

    def after_pull(self, *, seq: int, trainer_step: int) -> None:
        """Use the pulled weights, also for the samples of a paused engine."""
        self._note_step(seq, trainer_step)
        self.engine.weights_changed(seq, recompute_kv=self._recompute_kv_on_pull)

    def submit(self, call: BackendCall, emit: Emit | None, emit_row: EmitRow | None = None) -> None:
        """Queue a generation. Raises `BatchShapeError`."""
        tokens, lengths = call.arrays["tokens"], call.arrays["lengths"]
        ends = np.cumsum(lengths)[:-1]
        first_row = call.share.first_row
        generation = Generation(
            name=call.operation,
            prompts=[part.tolist() for part in np.split(tokens, ends)],
            samples_per_prompt=call.params.samples_per_prompt,
            sampling=call.params.sampling,
            emit=emit,
            weights_seq=call.seq,
            first_row=first_row,
            prompt_sampling={n: call.arrays[n] for n in PROMPT_SAMPLING if n in call.arrays},
        )
        if emit is not None and first_row:
            generation.emit = lambda row, *drawn: emit(first_row + row, *drawn)
        if emit_row is not None:
            generation.on_end = lambda row: self._emit_row(generation, row, emit_row)
        self._trainer_steps.setdefault(call.seq, call.trainer_step)
        self._leading.submit(generation)
        self._begun[call.operation] = generation

    def abort(self, operation: str, rows: Collection[int] | None = None) -> None:
        generation = self._begun.get(operation)
        if generation is None:
            return
        if rows is not None:
            first = generation.first_row
            mine = range(first, first + len(generation.finish))
            rows = frozenset(row - first for row in rows if row in mine)
        self._leading.abort(operation, rows)

    def load(self) -> dict[str, Any]:
        first = {name: each.first_row for name, each in self._begun.items()}
        lengths = self._leading.lengths()
        return {
            "rows": [
                (name, first[name] + row, tokens, runs) for name, row, tokens, runs, _ in lengths
            ],
            "groups": [length.group for length in lengths],
            "steps": list(self.engine.meter.latest),
            "tp_sizes": self._spec.tp_sizes,
            "subject": self._described,
            "vocab_size": self._spec.model.dimensions.vocabulary,
        }

    def step(self) -> list[tuple[str, BackendResult]]:
        return [(generation.name, self._result(generation)) for generation in self._leading.step()]

    def interrupt(self, operation: str) -> BackendResult | None:
        generation = self._leading.interrupt(operation)
        return None if generation is None else self._result(generation)

    def pause(self, *, recompute_kv: bool = True) -> None:
        self._recompute_kv_on_pull = recompute_kv
        self._leading.pause()

    def resume(self) -> None:
        self._leading.resume()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def has_work(self) -> bool:
        return self._engine is not None and self._engine.has_work

    def _result(self, generation: Generation) -> BackendResult:
        """A generation's result. `segments` lists `[row, start, weights_seq, trainer_step]` for
        rows that another version, or several, drew."""
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

    def _emit_row(self, generation: Generation, row: int, emit_row: EmitRow) -> None:
        spans = [(segment.start, segment.weights_seq) for segment in generation.segments[row]]
        drawn_by, details = None, generation.details[row]
        if generation.sampling.sampling_logprobs:
            # A row that drew nothing has no details.
            drawn_by = [] if details is None else details.sampling_logprobs.tolist()
        emit_row(
            generation.first_row + row,
            generation.tokens[row].tolist(),
            generation.logprobs[row].tolist(),
            generation.finish[row],
            [
                [start, seq, self._trainer_steps[seq]]
                for start, seq in spans or [(0, generation.weights_seq)]
            ],
            drawn_by,
        )

    def _note_step(self, seq: int, trainer_step: int) -> None:
        """Record that version `seq` draws next; versions that no unfinished generation used are
        dropped."""
        oldest = min((generation.weights_seq for generation in self._begun.values()), default=seq)
        kept = {old: step for old, step in self._trainer_steps.items() if old >= oldest}
        self._trainer_steps = {**kept, seq: trainer_step}

    @property
    def engine(self) -> EngineT:
        """This rank's engine."""
        assert self._engine is not None, "build comes first"
        return self._engine
