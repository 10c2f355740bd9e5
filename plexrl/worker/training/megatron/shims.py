"""Replacements of megatron-core's calls of torch in a worker process.

megatron-core 0.16 uses the current device, streams and random states without a check for a GPU;
`install_shims` replaces these calls on the CPU. It also allocates its own buffers of parameters and
gradients; `buffers_in` gives it memory of our own instead.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def install_shims() -> None:
    """Make megatron-core run in this process; called before a model is made.

    Without the random states of tensor ranks dropout would ignore these ranks, so it must be 0;
    PlexRL always sets it to 0.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    torch.cuda.synchronize = _no_effect
    # Megatron copies the experts' token counts from the GPU on a separate stream.
    torch.cuda.current_stream = _stream  # type: ignore[assignment]
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _stream()
    token_dispatcher.maybe_move_tensor_to_cpu = _counts
    schedules.torch = _TorchWithZeros(_zeros_on_cpu)


@contextmanager
def buffers_in(memory: Callable[[int, torch.dtype], torch.Tensor]) -> Iterator[None]:
    """In the block, `memory` makes the flat buffers of Megatron's data parallelism, which read as
    zero, from their numbers of elements and dtypes: for each its parameters, its gradients."""
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.torch = _TorchWithZeros(
        lambda elements, *, dtype, **_: memory(elements, dtype)
    )
    try:
        yield
    finally:
        param_and_grad_buffer.torch = torch


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


class _TorchWithZeros:
    """Replaces `torch` in a module of Megatron's; only `zeros` is another function."""

    def __init__(self, zeros: Callable[..., torch.Tensor]) -> None:
        self.zeros = zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _zeros_on_cpu(*sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """The pipeline schedules count tokens in a tensor on `cuda`."""
    return torch.zeros(*sizes, device="cpu" if device == "cuda" else device, **options)


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
