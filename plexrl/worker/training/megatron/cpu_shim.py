"""Replaces the CUDA calls of megatron-core on a machine without a GPU.

megatron-core 0.16 uses the current device, streams and random states without a check for a GPU. A
worker process calls `install_cpu_shim` before it makes a model; with CUDA the call does nothing.
Dropout would then ignore tensor ranks, so it must be 0; PlexRL always sets it to 0.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def install_cpu_shim() -> None:
    """Make megatron-core run in this process without CUDA."""
    if torch.cuda.is_available():
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    torch.cuda.synchronize = _no_effect
    # Megatron copies the experts' token counts from the GPU on a separate stream.
    torch.cuda.current_stream = _stream  # type: ignore[assignment]
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _stream()
    token_dispatcher.maybe_move_tensor_to_cpu = _counts
    random._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    schedules.torch = _TorchOnCpu()


class _NoRandomStates:
    """Replaces the tracker of the tensor ranks' random states."""

    def fork(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}


class _NoStream:
    """Replaces a stream and an event on it; on a CPU all work is synchronous."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    def __hash__(self) -> int:
        return 0

    def record_event(self) -> "_NoStream":
        return self

    def synchronize(self) -> None:
        return


class _TorchOnCpu:
    """Replaces `torch` in the pipeline schedules, which count tokens in a tensor on `cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
        found: torch.Tensor = torch.zeros(
            *sizes, device="cpu" if device == "cuda" else device, **options
        )
        return found


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces the copy of token counts from the GPU; returns numpy if `as_numpy`."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _cpu() -> torch.device:
    return torch.device("cpu")


def _stream(device: object = None) -> _NoStream:
    del device
    return _NoStream()


def _no_effect(device: object = None) -> None:
    del device
