"""FSDP2's record of a sharded parameter: how a shard is kept in memory of our own.

FSDP2 has no public way to that, because it pads shards of uneven size in memory of its own. So this
module uses private fields, and is the only one that does. `TESTED_RELEASES` have them.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plexrl.errors import InvalidRequestError

TESTED_RELEASES = ("2.11", "2.12", "2.13")
"""Releases of torch."""


def check_torch(version: str = torch.__version__) -> None:
    """Raises `InvalidRequestError` unless the `fsdp` backend was tested with this torch."""
    release = ".".join(version.split(".")[:2])
    if release not in TESTED_RELEASES:
        raise InvalidRequestError(
            f"backend 'fsdp' was tested with torch {', '.join(TESTED_RELEASES)}, and this node has "
            f"{version}: install one of these, or use another backend"
        )


class ShardedParameter:
    """One parameter that FSDP shards by rows over data-parallel ranks."""

    def __init__(self, record: Any) -> None:
        """`record` is torch's `FSDPParam`."""
        self._record = record
        self.padded_shape: tuple[int, ...] = tuple(record.padded_sharded_param_size)
        """Shape of every rank's shard, padding included."""
        self.global_shape: tuple[int, ...] = tuple(record.sharded_param.shape)

    @property
    def elements(self) -> int:
        """Elements of a shard, padding included."""
        return math.prod(self.padded_shape)

    @property
    def is_trained(self) -> bool:
        """Whether it needs gradients."""
        return bool(self._record.sharded_param.requires_grad)

    @property
    def value(self) -> torch.Tensor | None:
        """The padded shard, flat; None: it is on `meta`."""
        found: torch.Tensor = self._record._sharded_param_data
        return None if found.is_meta else found

    def bind(self, home: torch.Tensor, rows: int, *, gradient: torch.Tensor | None = None) -> None:
        """Keep the shard in `home` (`elements`, flat), of which `rows` rows are this rank's, and
        its gradient in `gradient`, in the shape of these rows.

        FSDP2 reads a shard through two references: the padded flat data that it gathers from, and
        the local tensor of the parameter. FSDP checks that they share a storage; they do, so it
        never copies them elsewhere.
        """
        record = self._record
        local = home.view(self.padded_shape).narrow(0, 0, rows)
        parameter = nn.Parameter(
            record.to_sharded_dtensor(local), requires_grad=record.sharded_param.requires_grad
        )
        record._sharded_param_data = home
        record.sharded_param = parameter
        record._setattr_on_modules(parameter)
        if gradient is not None:
            parameter.grad = record.to_sharded_dtensor(gradient)


def sharded_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """All parameters of a model by their canonical names; FSDP shards each of them."""
    records: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                records |= {id(record.sharded_param): record for record in group.fsdp_params}
    return {
        name: ShardedParameter(records[id(parameter)])
        for name, parameter in model.named_parameters(remove_duplicate=True)
    }


def _groups(state: Any) -> list[Any]:
    # Since torch 2.12 a module may have several groups.
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
