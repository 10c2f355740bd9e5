"""What megatron-core asks of CUDA, answered for a machine that has none.

megatron-core 0.16 asks for the current device, streams and random states without asking first
whether there is a GPU. A worker process without one calls `install_cpu_shim` before it makes a
model; nobody else does, and with CUDA it does nothing. Dropout is then not aware of tensor ranks,
so it must be 0, as PlexRL has it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def install_cpu_shim() -> None:
    """Have this process run megatron-core without CUDA."""
    if torch.cuda.is_available():
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    torch.cuda.synchronize = _no_effect
    # Experts' token counts are copied from the GPU on a stream of their own.
    torch.cuda.current_stream = _stream  # type: ignore[assignment]
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _stream()
    token_dispatcher.maybe_move_tensor_to_cpu = _counts
    random._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    schedules.torch = _TorchOnCpu()


class _NoRandomStates:
    """Stands for the tracker of tensor ranks' random states."""

    def fork(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}


class _NoStream:
    """Stands for a stream, and for an event on it: all is done when it was asked for."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    def __hash__(self) -> int:
        return 0

    def record_event(self) -> "_NoStream":
        return self

    def synchronize(self) -> None:
        return


class _TorchOnCpu:
    """`torch` for the pipeline schedules, which count tokens in a tensor on device `cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
        found: torch.Tensor = torch.zeros(
            *sizes, device="cpu" if device == "cuda" else device, **options
        )
        return found


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Token counts as they come from a GPU: as numpy where sizes of an exchange are wanted."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _cpu() -> torch.device:
    return torch.device("cpu")


def _stream(device: object = None) -> _NoStream:
    del device
    return _NoStream()


def _no_effect(device: object = None) -> None:
    del device
