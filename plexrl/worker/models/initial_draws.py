"""Records how a model's initial weights are drawn, so that each can be drawn again alone.

While a model is made with its parameters on `meta`, every operation that writes a parameter is kept
with the state of the random generator before it. The generator moves on as if the numbers had been
kept, so each parameter gets the bits that it has in a model made at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class _Write:
    """One operation in place on a parameter, or on a part of it."""

    operation: Callable[..., Any]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    generator: torch.Tensor | None
    """State of the random generator before it; absent: it draws nothing."""


class InitialDraws(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's is untyped
    """Active while the model is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, list[_Write]] = {}
        self._kept: list[torch.Tensor] = []
        """Keeps storages, whose identities are the keys of `_writes`, from being reused."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and keep it if it writes to memory on `meta`."""
        del types
        options = kwargs or {}
        for target, declared in zip(args[:1], func._schema.arguments, strict=False):
            writes = declared.alias_info is not None and declared.alias_info.is_write
            if writes and isinstance(target, torch.Tensor) and target.is_meta:
                self._keep(func, target, args[1:], options)
        return func(*args, **options)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether all of the parameter's elements were written, with values that are known."""
        writes = self._writes.get(_storage(parameter), [])
        sources = [source for write in writes for source in _on_meta(write.arguments)]
        is_whole = bool(writes) and writes[0].size == tuple(parameter.shape)
        # A part or a transposed view has other elements than its storage, which `draw` gives.
        is_whole = is_whole and parameter.is_contiguous() and parameter.storage_offset() == 0
        return is_whole and all(self.knows(source) for source in sources)

    def draw(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter's initial value, on the CPU. The global random state does not change."""
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for write in self._writes[_storage(parameter)]:
                if write.generator is not None:
                    torch.set_rng_state(write.generator)
                part = value.as_strided(write.size, write.stride, write.offset)
                # What was copied from another tensor on `meta` was drawn there.
                arguments = [
                    self.draw(argument) if _on_meta((argument,)) else argument
                    for argument in write.arguments
                ]
                write.operation(part, *arguments, **write.options)
        return value

    def _keep(
        self, func: Any, target: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        write = _Write(
            func,
            tuple(target.shape),
            target.stride(),
            int(target.storage_offset()),
            arguments,
            options,
            torch.get_rng_state() if draws else None,
        )
        if draws:
            # The numbers are dropped; the generator must move on by as many.
            func(torch.empty(target.shape, dtype=target.dtype), *arguments, **options)
        writes = self._writes.setdefault(_storage(target), [])
        if not writes:
            self._kept.append(target)
        nbytes = target.numel() * target.element_size()
        if func in _REPLACING and nbytes == target.untyped_storage().nbytes():
            writes.clear()
        writes.append(write)


_REPLACING = frozenset(
    {
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar,
    }
)
"""Operations whose result does not depend on what was there."""


def _on_meta(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    return [
        argument
        for argument in arguments
        if isinstance(argument, torch.Tensor) and argument.is_meta
    ]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
