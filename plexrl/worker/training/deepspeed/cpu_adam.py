"""DeepSpeed's CPUAdam, the kernel of ZeRO-Offload, on memory in the host tier.

DeepSpeed would keep float32 parameters, gradients and moments in memory of its own. Here only its
kernel is used: `plexrl.worker.state.host_optimizer` hands it chunks, with moments that lie in
memory borrowed from the StateManager for the next version. The parameters stay in the arena, where
weight sync and checkpoints read them.

The kernel multiplies up the powers of the betas from step to step, so its last bits would tell how
many steps this process has made. It is made anew for each step: then they depend on the state
alone, and a step after a switch gives the bits of one without.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.host_transfer import Chunk


class CpuAdam:
    """Compiled on first use on a machine, which takes a minute or two; cached by torch from then
    on (`TORCH_EXTENSIONS_DIR`)."""

    def __init__(self) -> None:
        """Raises:
        InvalidRequestError: the kernel cannot be compiled or loaded.
        """
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        try:
            with _compiling_alone():
                # It insists on a parameter of its own.
                self._adam = DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))])
        except RuntimeError as error:
            lacking = " and ".join(
                name for name, found in TOOLS.items() if not any(map(shutil.which, found))
            )
            raise InvalidRequestError(
                "DeepSpeed's CPUAdam, which steps an optimizer in host memory, cannot be compiled "
                f"on this node: install {lacking or 'what the log above asks for'}, or leave "
                f"optimizer out ({error.__cause__ or error})"
            ) from error

    def update(
        self,
        params: AdamParams,
        count: torch.Tensor,
        chunk: Chunk,
        first_moment: torch.Tensor,
        second_moment: torch.Tensor,
    ) -> None:
        """As `plexrl.worker.state.host_optimizer.adam_of_torch`."""
        kernel, name = self._adam.ds_opt_adam, self._adam.opt_id
        rates = (params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay)
        kernel.create_adam(name, *rates, True, False)
        kernel.adam_update(
            name,
            int(count),
            *rates,
            True,
            chunk.parameter,
            chunk.gradient,
            first_moment,
            second_moment,
        )


TOOLS = {"a C++ compiler": ("c++", "g++", "clang++"), "ninja": ("ninja",)}
"""What compiling needs, and the commands that it goes by."""


@contextmanager
def _compiling_alone() -> Iterator[None]:
    """Hold a lock that ends with this process, and remove torch's, which does not: left by a worker
    that was killed while it compiled, it would have all others wait for ever."""
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory("cpu_adam", verbose=False))
    with (folder / "plexrl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
