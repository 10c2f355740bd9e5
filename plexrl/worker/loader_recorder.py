"""What a model's own weight loader does, learnt by running it over tensors without data.

Loaders of engines cut, fuse and reorder a checkpoint's tensors in ways of their own (fused QKV,
gates next to their up-projections, stacked experts, shards of a tensor-parallel rank). Run over
meta tensors, every view that a loader takes still says which elements of which tensor it is of. So
each copy into a parameter becomes a wanted slice, and a plan made from those is right by
construction, whatever the model (vLLM's sharded pull does so).

Loaders may narrow, index by ranges, select, chunk, split, permute, concatenate, clone, convert and
copy. One that computes new values, or takes every other element, cannot be recorded and is told so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.worker.state.arena_tensors import TORCH_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""Takes a checkpoint's tensors by name and copies them into its model's parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parameter that a loader fills, and where its memory lies."""

    tensor: torch.Tensor
    """On the meta device, contiguous."""
    arena_offset: int


def record_loader(
    load: Load, checkpoint: Mapping[str, tuple[tuple[int, ...], str]], parameters: Sequence[Placed]
) -> Layout:
    """What `load` wants of a checkpoint for its parameters: a target for `make_plan`.

    `checkpoint` gives each tensor's shape and dtype.

    Raises:
        InvalidRequestError: the loader does something that is no copy of elements.
    """
    recorder = _Recorder(checkpoint, parameters)
    with recorder:
        load(recorder.tensors.items())
    return recorder.layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Elements of one storage."""

    storage: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_View":
        return cls(
            storage=tensor.untyped_storage()._cdata,
            offset=int(tensor.storage_offset()),
            sizes=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A box of a tensor that the loader made, and the view that it was copied from."""

    start: tuple[int, ...]
    source: _View


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(
        self,
        checkpoint: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Sequence[Placed],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.tensors = {
            name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")
            for name, (shape, dtype) in checkpoint.items()
        }
        self._names = {_View.of(tensor).storage: name for name, tensor in self.tensors.items()}
        self._parameters = {_View.of(placed.tensor).storage: placed for placed in parameters}
        self._made: dict[int, tuple[torch.Tensor, list[_Piece]]] = {}
        self._slices: list[StateSlice] = []
        self._strides: list[tuple[int, ...]] = []

    def layout(self) -> Layout:
        """Everything that was copied into parameters."""
        return Layout.of(self._slices, self._strides)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        match func.overloadpacket:
            case torch.ops.aten.copy_:
                self._copied(args[1].expand_as(args[0]), args[0])
            case torch.ops.aten.cat:
                self._made_of(out, args[0], int(args[1]) if len(args) > 1 else 0)
            case torch.ops.aten.clone | torch.ops.aten._to_copy:
                self._made_of(out, [args[0]], 0)
        return out

    def _made_of(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], dim: int) -> None:
        at = [0] * out.dim()
        pieces = []
        for tensor in inputs:
            pieces.append(_Piece(start=tuple(at), source=_View.of(tensor)))
            if out.dim():
                at[dim] += tensor.shape[dim]
        # The tensor is kept, or another storage could come to have its address.
        self._made[_View.of(out).storage] = (out, pieces)

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        found = _View.of(target)
        if found.storage not in self._parameters:
            raise InvalidRequestError(
                "the loader copies into a tensor that is no parameter: it cannot be recorded"
            )
        self._follow(_View.of(source), found)

    def _follow(self, source: _View, target: _View) -> None:
        """Record the copy of `source`, which may be of a tensor that the loader made, element by
        element to `target`; the two have the same sizes."""
        if source.storage in self._names:
            self._want(source, target)
            return
        if source.storage not in self._made:
            raise InvalidRequestError(
                "the loader computes what it copies: only cutting, joining and converting of "
                "tensors can be recorded"
            )
        made, pieces = self._made[source.storage]
        low, dims = _box(source, tuple(made.shape), tuple(made.stride()), "a tensor it made")
        for piece in pieces:
            inner = _common(low, dims, source.sizes, piece)
            if inner is None:
                continue
            start, sizes = inner
            self._follow(*_cut(target, piece, low, start, sizes, dims))

    def _want(self, source: _View, target: _View) -> None:
        name = self._names[source.storage]
        tensor = self.tensors[name]
        placed = self._parameters[target.storage]
        low, dims = _box(source, tuple(tensor.shape), tuple(tensor.stride()), name)
        shape, strides = [1] * tensor.dim(), [1] * tensor.dim()
        for view_dim, dim in enumerate(dims):
            if dim is not None:
                shape[dim] = source.sizes[view_dim]
                strides[dim] = target.strides[view_dim]
        itemsize = placed.tensor.element_size()
        self._slices.append(
            StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name=name),
                dtype=DTYPE_NAMES[placed.tensor.dtype],
                global_shape=tuple(tensor.shape),
                offset=low,
                shape=tuple(shape),
                arena_offset=placed.arena_offset + target.offset * itemsize,
            )
        )
        self._strides.append(tuple(strides))


def _box(
    view: _View, shape: tuple[int, ...], strides: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], list[int | None]]:
    """Where a view begins in a tensor, and the tensor's dimension that each of the view's is; None
    for one of extent 1.

    Raises:
        InvalidRequestError: the view is no box of the tensor.
    """
    left, low = view.offset, [0] * len(shape)
    for dim in sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d])):
        if shape[dim] > 1:
            low[dim], left = divmod(left, strides[dim])
    dims: list[int | None] = []
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if size == 1:
            dims.append(None)
            continue
        fits = [
            dim
            for dim in range(len(shape))
            if strides[dim] == stride and low[dim] + size <= shape[dim] and dim not in dims
        ]
        if not fits:
            raise InvalidRequestError(
                f"the loader takes elements of {name} that are no box of it (sizes "
                f"{list(view.sizes)}, strides {list(view.strides)}): it cannot be recorded"
            )
        dims.append(fits[0])
    return tuple(low), dims


def _common(
    low: tuple[int, ...], dims: Sequence[int | None], sizes: Sequence[int], piece: _Piece
) -> tuple[list[int], list[int]] | None:
    """The box, in the made tensor, that a view of it and a piece of it share."""
    extents = [1] * len(low)
    for size, dim in zip(sizes, dims, strict=True):
        if dim is not None:
            extents[dim] = size
    start = [max(a, b) for a, b in zip(low, piece.start, strict=True)]
    end = [
        min(a + n, b + m)
        for a, n, b, m in zip(low, extents, piece.start, piece.source.sizes, strict=True)
    ]
    shared = [b - a for a, b in zip(start, end, strict=True)]
    return None if any(extent <= 0 for extent in shared) else (start, shared)


def _cut(
    target: _View,
    piece: _Piece,
    low: tuple[int, ...],
    start: Sequence[int],
    sizes: Sequence[int],
    dims: Sequence[int | None],
) -> tuple[_View, _View]:
    """The shared box as views of what the piece was made from and of the target."""
    inside = [a - b for a, b in zip(start, piece.start, strict=True)]
    offset = piece.source.offset + sum(
        a * step for a, step in zip(inside, piece.source.strides, strict=True)
    )
    target_offset = target.offset
    kept: list[tuple[int, int, int]] = []
    for view_dim, dim in enumerate(dims):
        if dim is None:
            kept.append((1, 1, target.strides[view_dim]))
            continue
        target_offset += (start[dim] - low[dim]) * target.strides[view_dim]
        kept.append((sizes[dim], piece.source.strides[dim], target.strides[view_dim]))
    shape = tuple(size for size, _, _ in kept)
    return (
        _View(
            storage=piece.source.storage,
            offset=offset,
            sizes=shape,
            strides=tuple(step for _, step, _ in kept),
        ),
        _View(
            storage=target.storage,
            offset=target_offset,
            sizes=shape,
            strides=tuple(step for _, _, step in kept),
        ),
    )
