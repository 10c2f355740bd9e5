"""What a rollout engine does, whoever made it.

An engine is driven from one thread. Between two calls of `step` every sample stands at a token
boundary; all other calls take effect there.
"""

from dataclasses import dataclass
from typing import Protocol

from plexrl.worker.rollout.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made, unless said otherwise."""

    running: int
    """Samples that hold a slot now."""
    waiting: int
    """Samples that do not, preempted ones among them."""
    paused: bool
    weights_seq: int
    """Version of the weights now."""
    steps: int
    tokens_drawn: int
    tokens_computed: int
    """Tokens run through the model."""
    tokens_recomputed: int
    """Of these, tokens whose cache was given up before: the price of preemptions and updates."""
    prefix_tokens_reused: int
    """Prompt tokens that were found in the cache instead."""
    preemptions: int
    """Times that a sample gave its blocks up for an older one."""
    kv_bytes_max: int
    """Budget of the cache."""
    block_bytes: int
    blocks: int
    blocks_held: int
    """Blocks of samples now."""
    blocks_kept: int
    """Blocks of nobody now, kept for what they hold."""


class RolloutEngine(Protocol):
    """Generates with one copy of the weights, many calls at a time."""

    @property
    def has_work(self) -> bool:
        """`step` has something to do or to hand over. False while paused, if nothing ended."""
        ...

    def submit(self, generation: Generation) -> None:
        """Queue a generation; also while paused.

        Raises:
            BatchShapeError: a prompt is empty or leaves no room for a token.
        """
        ...

    def step(self) -> list[Generation]:
        """Draw at most one token for every sample; returns what ended since the last step."""
        ...

    def abort(self, name: str) -> None:
        """End a generation with what it has; the next step returns it. Unknown: no effect."""
        ...

    def interrupt(self, name: str) -> Generation | None:
        """Take a generation out now, with what it has; no step returns it. None: unknown."""
        ...

    def pause(self) -> None:
        """Draw nothing until `resume`. What runs keeps its place and its cache."""
        ...

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        ...

    def weights_changed(self, weights_seq: int, *, recompute_kv: bool = True) -> None:
        """The weights that the engine reads were replaced, in place; go on with these.

        `recompute_kv`: what the running samples cached is computed anew, so that they continue as
        the new weights would have it. Otherwise they keep the cache of the former weights, which
        is quicker and off-policy; new samples never see it.
        """
        ...

    def drop_cache(self) -> None:
        """Give the cache's memory back. Running samples wait and are computed anew later."""
        ...

    def stats(self) -> EngineStats:
        """How it stands."""
        ...
