"""DeepSpeed's ZeRO-2 optimizer, working on memory that PlexRL lends.

DeepSpeed flattens the parameters, reduces gradients to the rank whose partition they are of, and
after a step gathers what the ranks have updated. Two of its buffers outlive a call, and are
replaced by views of an arena: this rank's partition in float32, and its gradients. The flat buffer
that the model computes from is derived from the partitions, so it may be freed at any time and
gathered again.

Of DeepSpeed's engine nothing is used: it would scale losses, clip, count micro-steps and schedule
the learning rate, all of which PlexRL's operations say themselves.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed.utils.timer import NoopTimer
from torch import nn

BUCKET_ELEMENTS_MAX = 50_000_000
"""Gradients that are reduced together: a scratch buffer of so many elements while a backward runs.
DeepSpeed's default is ten times that, more than a node of several tenants should lend."""


class ArenaZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # deepspeed is untyped
    """Steps one rank's partition. There is one parameter group, hence the indices 0."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        partition: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        """Move `parameters` into one flat buffer.

        `partition` has this rank's part of their values already; it and `gradient` are float32
        `[elements / ranks]`, on the arena.
        """
        self._lent_gradient = gradient
        elements = sum(parameter.numel() for parameter in parameters)
        super().__init__(
            # Only its parameter group is asked for; steps are made by `step_by`.
            torch.optim.AdamW(parameters),
            param_names={parameter: str(i) for i, parameter in enumerate(parameters)},
            timers=NoopTimer(),
            optimizer_params={},
            reduce_bucket_size=min(elements, BUCKET_ELEMENTS_MAX),
            dp_process_group=dist.group.WORLD,
            clip_grad=0.0,
            communication_data_type=torch.float32,
            # The loss of a batch is a sum over ranks.
            gradient_average=False,
            check_grad_overflow=False,
            compute_grad_norm=False,
        )
        (own,) = self.single_partition_of_fp32_groups
        assert own.shape == partition.shape, "the partitions are not laid out as DeepSpeed's are"
        self.single_partition_of_fp32_groups[0] = nn.Parameter(partition)
        self.optimizer.param_groups[0]["params"] = list(self.single_partition_of_fp32_groups)

    @property
    def flat(self) -> torch.Tensor:
        """What the model computes from: all partitions, in the model's dtype."""
        (flat,) = self.bit16_groups_flat
        assert isinstance(flat, torch.Tensor)
        return flat

    def release(self) -> None:
        """Free `flat`; views of it stay, and are valid again after `gather`."""
        self.flat.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Fill `flat` from the partitions, if it is not."""
        if self._allocate():
            self.update_lp_params()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Have the backward that runs in the block add to the gradients of all ranks."""
        self.clear_backward_seen_flag()
        self.enter_backward()
        yield
        self.overlapping_partition_gradients_reduce_epilogue()
        self.exit_backward()

    def step_by(self, update: Callable[[], None]) -> None:
        """Have `update` step the partition, and gather. Raises as `update` does, if that changed
        nothing with nothing changed."""
        self._allocate()
        self.averaged_gradients[0] = self._build_compact_grad_partition_buffer(0)
        self._update = update
        self.step()

    def _allocate(self) -> bool:
        storage = self.flat.untyped_storage()
        if storage.size():
            return False
        storage.resize_(self.flat.numel() * self.flat.element_size())
        return True

    # What DeepSpeed calls.

    def _use_compact_grad_partition_buffer(self, _group_idx: int) -> bool:
        """One flat buffer for the gradients of this rank's partition; DeepSpeed has it for bf16
        only, and keeps whole parameters' gradients otherwise."""
        return True

    def _build_compact_grad_partition_buffer(self, _group_idx: int) -> GradPartitionBufferGroup:
        return GradPartitionBufferGroup([], self._lent_gradient)

    def _optimizer_step(self, _group_no: int) -> None:
        self._update()

    def _link_all_hp_params(self) -> None:
        """Not link parameters to the partitions: only DeepSpeed's own checkpoints need that, and it
        would keep alive the buffers that were replaced."""
        for parameter in self.bit16_groups[0]:
            parameter._hp_mapping = None


def connect() -> None:
    """Have DeepSpeed use the default process group, on the CPU.

    Two things that ZeRO never calls are left out, so that no compiler is needed and no minute lost:
    reductions in shared memory, whose kernel DeepSpeed would compile now; and torch.compile of the
    Muon optimizer, which the first reduction imports whatever the optimizer is.
    """
    if get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())
    # As attributes of their package some of these are hidden by what it imports.
    backend, wrappers, compiler = (
        importlib.import_module(f"deepspeed.{name}")
        for name in ("comm.torch", "comm.comm", "runtime.compiler")
    )
    with _replaced(compiler, "compile", lambda: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    with _replaced(backend, "build_shm_op", lambda: None):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    # What torch calls it since it deprecated the name that DeepSpeed knows; 2.11 has only that one.
    wrappers.cdb.all_gather_function = getattr(
        dist, "all_gather_single", dist.all_gather_into_tensor
    )


@contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
