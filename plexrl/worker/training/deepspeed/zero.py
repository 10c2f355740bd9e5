"""DeepSpeed's ZeRO-2 optimizer on arena memory.

DeepSpeed flattens the parameters, reduces each gradient to the rank that owns its partition, and
gathers the updated parameters after a step. Two of its buffers outlive a call and are replaced by
views of an arena: this rank's partition in float32, and its gradients. The flat buffer that the
model computes from is derived from the partitions, so it may be freed at any time and gathered
again.

DeepSpeed's engine is not used: it would scale losses, clip gradients, count micro-steps and
schedule the learning rate, all of which PlexRL's operations define.
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
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed.utils.timer import NoopTimer
from torch import nn

from plexrl.model.memory.state_terms import BUCKET_ELEMENTS_MAX
from plexrl.worker.state.device import WorkerDevice


class OnlyGpu(CUDA_Accelerator):  # type: ignore[misc]  # deepspeed is untyped
    """The only GPU that this process sees. It is made visible by its UUID, which DeepSpeed's own
    way to read free memory takes for a number."""

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the device."""
        return torch.cuda.mem_get_info(device_index)[0]


ACCELERATORS = {"cpu": CPU_Accelerator, "cuda": OnlyGpu}
"""DeepSpeed's view of each kind of device."""


class ArenaZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # deepspeed is untyped
    """The optimizer of one rank's partition. There is one parameter group, hence the indices 0."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        partition: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        """Move `parameters` into one flat buffer, without their values: `gather` fills it.

        `partition` holds this rank's part of their values. It and `gradient` are float32
        `[elements / ranks]`, on the arena, and on the device of `parameters`.
        """
        self._arena_gradient = gradient
        self._elements = elements = sum(parameter.numel() for parameter in parameters)
        super().__init__(
            # DeepSpeed reads only its parameter group; `step_by` steps.
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
        assert own.shape == partition.shape, "the partitions differ from DeepSpeed's layout"
        self.single_partition_of_fp32_groups[0] = nn.Parameter(partition)
        self.optimizer.param_groups[0]["params"] = list(self.single_partition_of_fp32_groups)

    @property
    def flat(self) -> torch.Tensor:
        """The buffer that the model computes from: all partitions, in the model's dtype."""
        (flat,) = self.bit16_groups_flat
        assert isinstance(flat, torch.Tensor)
        return flat

    def release(self) -> None:
        """Free the memory of `flat`. Views of it are valid again after `gather`."""
        self.flat.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Fill `flat` from the partitions if it is free."""
        if self._allocate():
            self.update_lp_params()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """The backward inside the block adds to the gradients of all ranks."""
        self.clear_backward_seen_flag()
        self.enter_backward()
        yield
        self.overlapping_partition_gradients_reduce_epilogue()
        self.exit_backward()

    def step_by(self, update: Callable[[], None]) -> None:
        """Step the partition with `update`, and gather. Raises as `update` does; if `update`
        changed nothing, nothing is changed."""
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

    # Called by DeepSpeed.

    def flatten_dense_tensors_aligned(
        self, tensor_list: Sequence[torch.Tensor], _alignment: int, **_options: object
    ) -> torch.Tensor:
        """Memory for all parameters. DeepSpeed would copy values, which `gather` writes anyway."""
        dtype, device = tensor_list[0].dtype, self._arena_gradient.device
        return torch.empty(self._elements, dtype=dtype, device=device)

    def initialize_optimizer_states(self) -> None:
        """Allocate nothing: the arena holds gradients and moments. DeepSpeed would allocate the
        gradients of the partition."""

    def _use_compact_grad_partition_buffer(self, _group_idx: int) -> bool:
        """Keep the gradients of this rank's partition in one flat buffer. DeepSpeed does so for
        bf16 only, and otherwise keeps the gradients of whole parameters."""
        return True

    def _build_compact_grad_partition_buffer(self, _group_idx: int) -> GradPartitionBufferGroup:
        return GradPartitionBufferGroup([], self._arena_gradient)

    def _optimizer_step(self, _group_no: int) -> None:
        self._update()

    def _link_all_hp_params(self) -> None:
        """Do not link parameters to the partitions: only DeepSpeed's own checkpoints need the
        links, and they would keep the replaced buffers alive."""
        for parameter in self.bit16_groups[0]:
            parameter._hp_mapping = None


def connect(device: WorkerDevice) -> None:
    """Make DeepSpeed use the default process group, and this device.

    Two parts that ZeRO never calls are disabled, because they need a compiler and up to a minute:
    reductions in shared memory, whose kernel DeepSpeed would compile here; and torch.compile of the
    Muon optimizer, which the first reduction imports for any optimizer.
    """
    # Without this DeepSpeed would choose a GPU wherever there is one.
    accelerator = ACCELERATORS[device.torch_device.type]
    if not isinstance(get_accelerator(), accelerator):
        set_accelerator(accelerator())
    # The package's attributes hide some of these modules, so they are imported by name.
    backend, wrappers, compiler = (
        importlib.import_module(f"deepspeed.{name}")
        for name in ("comm.torch", "comm.comm", "runtime.compiler")
    )
    with _replaced(compiler, "compile", lambda: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    with _replaced(backend, "build_shm_op", lambda: None):
        deepspeed.init_distributed(dist_backend=device.collectives, auto_mpi_discovery=False)
    # torch deprecated the name that DeepSpeed uses; torch 2.11 has only the older one.
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
