"""The interface of a rollout engine.

One thread calls an engine. Between two calls of `step` every sample is at a token boundary, and all
other calls take effect there.
"""

from dataclasses import dataclass
from typing import Protocol

from plexrl.worker.rollout.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's current state, and counters since the engine was created."""

    running: int
    """Samples that hold a slot."""
    waiting: int
    """Samples without a slot, including preempted ones."""
    paused: bool
    weights_seq: int
    """Version of the weights."""
    steps: int
    tokens_drawn: int
    tokens_computed: int
    """Tokens run through the model."""
    tokens_recomputed: int
    """Computed tokens whose cache had been dropped: the cost of preemptions and weight updates."""
    prefix_tokens_reused: int
    """Prompt tokens found in the prefix cache."""
    preemptions: int
    """Times that a sample lost its blocks to an older one."""
    kv_bytes_max: int
    """Budget of the KV cache."""
    block_bytes: int
    blocks: int
    blocks_held: int
    """Blocks that samples hold."""
    blocks_kept: int
    """Blocks that no sample holds, kept in the prefix cache."""


class RolloutEngine(Protocol):
    """Generates with one copy of the weights, many calls at a time."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would draw a token or return a generation. A paused engine draws none."""
        ...

    def submit(self, generation: Generation) -> None:
        """Queue a generation; also while paused.

        Raises:
            BatchShapeError: a prompt is empty or as long as the longest sequence.
        """
        ...

    def step(self) -> list[Generation]:
        """Draw at most one token for every sample; returns the generations that have ended."""
        ...

    def abort(self, name: str) -> None:
        """End a generation with the tokens drawn so far; the next step returns it. No effect for an
        unknown name."""
        ...

    def interrupt(self, name: str) -> Generation | None:
        """Remove and return a generation with the tokens drawn so far. None: unknown name."""
        ...

    def pause(self) -> None:
        """Draw no tokens until `resume`. Running samples keep their slots and their cache."""
        ...

    def resume(self) -> None:
        """Continue after `pause`."""
        ...

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        """Continue with version `weights_seq`: the caller has replaced the weights in place.

        With `recompute_kv`, the cache of running samples is recomputed with the new weights.
        Without it, they keep the cache of the previous weights, which is faster and further
        off-policy. New samples never reuse that cache.
        """
        ...

    def drop_cache(self) -> None:
        """Free the cache's memory. Running samples wait and are recomputed later."""
        ...

    def stats(self) -> EngineStats:
        """Current state and counters."""
        ...
