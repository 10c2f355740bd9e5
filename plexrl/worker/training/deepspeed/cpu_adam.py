"""DeepSpeed's CPUAdam, the kernel of ZeRO-Offload, on memory in the host tier.

Only DeepSpeed's kernel is used, because DeepSpeed itself would keep parameters, gradients and
moments in its own memory. `plexrl.worker.state.host.optimizer` passes chunks to the kernel. Their
moments are in memory that the StateManager allocated for the next version. The parameters stay in
the arena, where weight sync and checkpoints read them.

The kernel accumulates the powers of the betas from step to step, so its last bits would depend on
the number of steps of this process. It is created again for each step, so that the result depends
on the state alone: a step gives the same bits with or without a context switch before it.
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
from plexrl.worker.state.host.optimizer import sgd_of_torch


class CpuAdam:
    """The compiled kernel. The first use on a machine compiles it, which takes a minute or two;
    torch caches the result (`TORCH_EXTENSIONS_DIR`)."""

    def __init__(self) -> None:
        """Raises:
        InvalidRequestError: the kernel cannot be compiled or loaded.
        """
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        try:
            with _compiling_alone():
                # Its constructor requires a parameter.
                self._adam = DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))])
        except RuntimeError as error:
            lacking = " and ".join(
                name for name, found in TOOLS.items() if not any(map(shutil.which, found))
            )
            raise InvalidRequestError(
                "DeepSpeed's CPUAdam, which steps an optimizer in host memory, cannot be compiled "
                f"on this node: install {lacking or 'what the log above names'}, or leave "
                f"optimizer out ({error.__cause__ or error})"
            ) from error

    def update(
        self,
        params: AdamParams,
        count: torch.Tensor,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        first_moment: torch.Tensor,
        second_moment: torch.Tensor,
    ) -> None:
        """As `plexrl.worker.state.host.optimizer.step_of_torch`."""
        if params.optimizer == "sgd":
            sgd_of_torch(params, parameters, gradients, first_moment)
            return
        kernel, name = self._adam.ds_opt_adam, self._adam.opt_id
        rates = (params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay)
        kernel.create_adam(name, *rates, True, False)
        tensors = (parameters, gradients, first_moment, second_moment)
        kernel.adam_update(name, int(count), *rates, True, *tensors)


TOOLS = {"a C++ compiler": ("c++", "g++", "clang++"), "ninja": ("ninja",)}
"""Tools that the compilation needs, and the commands that provide each of them."""


@contextmanager
def _compiling_alone() -> Iterator[None]:
    """Hold a lock that ends with this process, and remove torch's lock file.

    torch's lock file does not end with its process: after a worker was killed while it compiled,
    all others would wait forever.
    """
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory("cpu_adam", verbose=False))
    with (folder / "plexrl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
