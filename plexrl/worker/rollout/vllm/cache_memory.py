"""Frees the memory of vLLM's KV cache while it is empty.

vLLM's own sleep mode does nothing on CPUs but reports success, and on GPUs it keeps the weights in
memory of its own. This module resizes the allocations themselves, and reports how much memory they
hold. On a GPU torch keeps freed memory until `WorkerDevice.free_cached`.
"""

from typing import Any

import torch


class CacheMemory:
    """The allocations of vLLM's KV cache. The cache's tensors stay valid after both calls."""

    def __init__(self, runner: Any) -> None:
        # Layers may share one allocation.
        storages = [tensor.untyped_storage() for tensor in runner.kv_caches]
        distinct = {storage.data_ptr(): storage for storage in storages}
        self._storages: list[torch.UntypedStorage] = list(distinct.values())
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def nbytes(self) -> int:
        """Size of the whole cache when it is allocated."""
        return sum(self._sizes)

    @property
    def held_bytes(self) -> int:
        """Memory that the allocations hold now."""
        return sum(storage.nbytes() for storage in self._storages)

    def release(self) -> None:
        """Free the memory. vLLM's scheduler must have dropped its cached blocks."""
        for storage in self._storages:
            storage.resize_(0)

    def ensure(self) -> None:
        """Allocate the memory if it is free, zeroed: a kernel may read masked, unwritten values."""
        for storage, nbytes in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
                empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
                empty.set_(storage).zero_()
