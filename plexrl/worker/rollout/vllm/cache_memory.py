"""The memory of vLLM's KV cache, given back while nothing is cached in it.

vLLM's own sleep does nothing on CPUs and says that it has slept; here the allocations themselves
are emptied, and what is held can be asked.
"""

from typing import Any

import torch


class CacheMemory:
    """The allocations behind vLLM's cache. Its tensors stay valid over both calls."""

    def __init__(self, runner: Any) -> None:
        # Layers may share one allocation.
        storages = [tensor.untyped_storage() for tensor in runner.kv_caches]
        distinct = {storage.data_ptr(): storage for storage in storages}
        self._storages: list[torch.UntypedStorage] = list(distinct.values())
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def nbytes(self) -> int:
        """Of it all, while it is there."""
        return sum(self._sizes)

    @property
    def held_bytes(self) -> int:
        """As the allocations have them now."""
        return sum(storage.nbytes() for storage in self._storages)

    def release(self) -> None:
        """Give it back. The scheduler must have forgotten what is cached."""
        for storage in self._storages:
            storage.resize_(0)

    def ensure(self) -> None:
        """Have it, zeroed if it was away: a kernel may read, masked, what nobody wrote."""
        for storage, nbytes in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
