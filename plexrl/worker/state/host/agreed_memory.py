"""Host memory for a write that all ranks make together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plexrl.statemanager.client.host_arena import HostArena
from plexrl.worker.state.rank_agreement import on_all_ranks


@contextmanager
def memory_on_all_ranks(
    arena: HostArena | None, gather: Callable[[str], list[str]]
) -> Iterator[None]:
    """Reserve what a write within the block needs. A rank that has no memory would raise there
    alone, while the others wait for it in a collective. Without an arena this does nothing.

    Raises:
        StateTierFullError: some rank has no memory; on every rank, before the block.
    """
    if arena is None:
        yield
        return

    def reserve() -> str:
        arena.reserve()
        return ""

    try:
        on_all_ranks(gather, reserve)
        yield
    finally:
        arena.unreserve()
