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

    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    torch.cuda.synchronize = _no_effect
    random._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    schedules.torch = _TorchOnCpu()


class _NoRandomStates:
    """Stands for the tracker of tensor ranks' random states."""

    def fork(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}


class _TorchOnCpu:
    """`torch` for the pipeline schedules, which count tokens in a tensor on device `cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
        found: torch.Tensor = torch.zeros(
            *sizes, device="cpu" if device == "cuda" else device, **options
        )
        return found


def _cpu() -> torch.device:
    return torch.device("cpu")


def _no_effect(device: object = None) -> None:
    del device
