"""vLLM's scheduler with counters, and with a mode that runs one request alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler


class CountingScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not installed for type checks
    """Counts what `EngineStats` reports."""

    tokens_computed = 0
    tokens_recomputed = 0
    prefix_tokens_reused = 0
    preemptions = 0
    blocks_held_then = 0
    """Blocks that samples held when the last step was planned."""
    decode: tuple[int, int] | None = None
    """Samples of the last planned step, and the tokens in their caches. None: the step computes
    more than one token of some sample, or draws none for it."""
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    _for_memory = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.preempted: list[str] = []
        """Requests that lost their blocks to others; the reader empties the list."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, with counters."""
        self._for_memory = True
        planned = super().schedule(*args, **kwargs)
        self._for_memory = False
        self.tokens_computed += planned.total_num_scheduled_tokens
        for request in planned.scheduled_new_reqs:
            self.prefix_tokens_reused += request.num_computed_tokens
        self.blocks_held_then = self.blocks_held
        self.decode = self._decode_of(planned)
        return planned

    def _decode_of(self, planned: Any) -> tuple[int, int] | None:
        rows = [self.requests[name] for name in planned.num_scheduled_tokens]
        if not rows or planned.total_num_scheduled_tokens != len(rows):
            return None
        # vLLM counts tokens as computed when it plans them.
        if any(
            not row.num_prompt_tokens < row.num_computed_tokens == row.num_tokens for row in rows
        ):
            return None
        return len(rows), sum(row.num_computed_tokens for row in rows)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.tokens_recomputed += request.num_computed_tokens
        # A cache reset also preempts requests, but not for another request's blocks.
        if self._for_memory:
            self.preemptions += 1
            self.preempted.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block, present requests do not run and keep their cache."""
        there = (self.running, self.waiting)
        self.running, self.waiting = [], create_request_queue(self.policy)
        try:
            yield
        finally:
            self.running, self.waiting = there

    @property
    def blocks(self) -> int:
        """Blocks that samples can hold; the null block is not counted."""
        return int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    @property
    def blocks_held(self) -> int:
        """Blocks that samples hold."""
        return self.blocks - int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def blocks_kept(self) -> int:
        """Blocks that no sample holds, kept in the prefix cache."""
        return sum(
            block.ref_cnt == 0 and block.block_hash is not None
            for block in self.kv_cache_manager.block_pool.blocks
        )
