"""Decode steps that are captured once for each shape, and replayed.

The CPU launches some twenty kernels for each layer of a decode step, which takes longer than the
kernels of a small batch; a CUDA graph launches all of them at once. A graph refers to memory by
address. Weights and KV cache are in the worker's arena, whose addresses stay reserved while the
memory is away (PlexRL §5.3), so graphs outlive offloads and weight syncs. Their activations are in
torch's memory and stay on the device; `GATHERED_BYTES_MAX` bounds them.

Shapes: T tokens, V vocabulary.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from plexrl.model.memory.kv_cache import GATHERED_BYTES_MAX
from plexrl.worker.rollout.engine.forward.decode_shapes import (
    PaddedStep,
    StepShape,
    context_positions,
    shape_of,
)
from plexrl.worker.rollout.engine.kv_pool import KvPool
from plexrl.worker.rollout.engine.step_batch import StepBatch
from plexrl.worker.rollout.engine.tensor_parallel import RankGroup
from plexrl.worker.state.device import Capture

LOG = logging.getLogger(__name__)

GRAPHS_MAX = 64
"""Graphs of one engine: each holds some megabytes of the driver's memory. The one that was not used
for longest is dropped. 9 sizes of up to 256 rows, by about 7 lengths that they have."""

Forward = Callable[[StepBatch, KvPool], torch.Tensor]
"""As `selection.Forward`."""


class _Step:
    """One captured step."""

    def __init__(
        self, inputs: PaddedStep, logits_TV: torch.Tensor, replay: Callable[[], None]
    ) -> None:
        self._inputs = inputs
        self._logits_TV = logits_TV
        self._replay = replay

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        self._inputs.fill(batch)
        self._replay()
        return self._inputs.real(self._logits_TV, batch)


class DecodeGraphs:
    """A forward pass that replays decode steps. All other steps run as they are.

    Logits of a replayed step are valid until the next step.
    """

    def __init__(self, forward: Forward, capture: Capture, ranks: RankGroup | None = None) -> None:
        """`forward` must do the same work on the device for equal shapes, and not wait for it.
        `ranks`: the tensor-parallel group; its ranks make the same calls in the same order."""
        self._forward = forward
        self._ranks = ranks
        self._capture: Capture | None = capture
        self._steps: OrderedDict[StepShape, _Step] = OrderedDict()
        self._seen: set[StepShape] = set()
        """Shapes that occurred once since they had no graph. A graph costs about three steps."""
        self._logits: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        """Memory of the logits, by number of rows: graphs share it, since one runs at a time. It
        is freed with the last of them."""

    def __call__(self, batch: StepBatch, pool: KvPool) -> torch.Tensor:
        """As `Forward`."""
        step = self._step_of(batch, pool)
        return self._forward(batch, pool) if step is None else step(batch)

    def _step_of(self, batch: StepBatch, pool: KvPool) -> _Step | None:
        """The captured step for `batch`; None: there is none."""
        shape = None if self._capture is None else shape_of(batch)
        if shape is None:
            return None
        found = self._steps.get(shape)
        if found is not None:
            self._steps.move_to_end(shape)
            return found
        positions = context_positions(shape, pool.block_tokens)
        if positions * pool.position_bytes > GATHERED_BYTES_MAX:
            return None
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        return self._captured(shape, pool)

    def _captured(self, shape: StepShape, pool: KvPool) -> _Step | None:
        inputs = PaddedStep(shape, pool.block_tokens, device=pool.device, dtype=pool.dtype)
        if len(self._steps) >= GRAPHS_MAX:
            # The next capture can use the memory of its activations. With more shapes in turn than
            # graphs, each would else be captured at every occurrence.
            dropped, _ = self._steps.popitem(last=False)
            self._seen.discard(dropped)
        logits_TV = self._logits_of(self._forward(inputs.batch, pool))

        def work() -> None:
            logits_TV.copy_(self._forward(inputs.batch, pool))

        replay = self._replay_of(work, shape)
        if replay is None:
            self._capture = None
            self._steps.clear()
            return None
        made = self._steps[shape] = _Step(inputs, logits_TV, replay)
        return made

    def _replay_of(self, work: Callable[[], None], shape: StepShape) -> Callable[[], None] | None:
        """Captured work. None: it could not be captured, here or on another rank. A step with a
        graph is padded, so the collectives of ranks with and without one would not match."""
        assert self._capture is not None, "shapes are looked up only with it"
        replay, failure = None, ""
        try:
            replay = self._capture(work)
        except RuntimeError as error:
            # Whatever keeps this model from being captured, its steps can run as they are.
            failure = f"{shape}: {error}"
        failures = [failure] if self._ranks is None else self._ranks.gather(failure)
        for rank, found in enumerate(failures):
            if found:
                LOG.warning("decode steps run without CUDA graphs: rank %d: %s", rank, found)
                replay = None
        return replay

    def _logits_of(self, found_TV: torch.Tensor) -> torch.Tensor:
        """Memory for the logits of all steps with so many rows."""
        return self._logits.setdefault(len(found_TV), found_TV)
