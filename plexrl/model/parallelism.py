"""Parallel layout of a model over the ranks of a deployment: axes, coordinates, groups. Pure.

Axes: `dp` data (different rows), `tp` tensor (a part of every matrix), `pp` pipeline (a part of the
layers), `cp` context (a part of every row), `ep` expert (some of a layer's experts).

Ranks are numbered with tp fastest, then cp, dp, pp: the order `tp-cp-ep-dp-pp` of megatron-core
(`parallel_state.py`), so that the ranks that communicate most share a node. As in megatron-core,
experts have separate axes over the same ranks: all ranks of a pipeline stage, tp·cp·dp of them, are
arranged as ep (fastest) times expert_dp. Experts are whole: tp does not cut their matrices (an
expert tensor parallel size of 1). So ep divides tp·cp·dp and adds no ranks.
"""

from dataclasses import dataclass
from typing import Literal

from plexrl.errors import LayoutError
from plexrl.limits import LIMITS

Axis = Literal["dp", "tp", "pp", "cp", "ep", "expert_dp"]

AXES: tuple[Axis, ...] = ("dp", "tp", "pp", "cp", "ep")
"""The axes of a layout that have a size of their own."""

DENSE_AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
"""Axes of layers without experts, the fastest first."""

EXPERT_AXES: tuple[Axis, ...] = ("ep", "expert_dp", "pp")
"""Axes of expert layers, over the same ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's index on every axis."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    expert_dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The size of every axis.

    Raises:
        LayoutError: a size is invalid; `details["field"]` names the axis.
    """

    dp: int = 1
    """Groups of ranks that get different rows."""
    tp: int = 1
    """Parts of each matrix."""
    pp: int = 1
    """Stages of layers."""
    cp: int = 1
    """Parts of each row."""
    ep: int = 1
    """Parts of each layer's experts; divides tp·cp·dp."""

    def __post_init__(self) -> None:
        for name in AXES:
            size, limit = getattr(self, name), LIMITS["layout"][name]
            if not limit.holds(size):
                raise LayoutError(f"parallelism.{name} is {size!r}: it must be {limit}", field=name)
        ranks = self.tp * self.cp * self.dp
        if ranks % self.ep:
            raise LayoutError(
                f"parallelism.ep is {self.ep} and tp·cp·dp is {ranks}: experts are spread over the "
                "tensor, context and data ranks, so ep must divide tp·cp·dp",
                field="ep",
            )

    @classmethod
    def from_text(cls, text: str) -> "Parallelism":
        """A layout from `text`, such as `dp=2,tp=2`. Missing axes have size 1.

        Raises:
            LayoutError: the text has another form, or a size is invalid.
        """
        sizes: dict[str, int] = {}
        for part in text.replace(" ", ",").split(","):
            axis, _, size = part.partition("=")
            if axis not in AXES or axis in sizes or not size.isdecimal():
                raise LayoutError(
                    f"{part!r} in layout {text!r} is not an axis with a size: write dp=2,tp=2, "
                    "with each of dp, tp, pp, cp, ep at most once",
                    field="layout",
                )
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks, which is the number of workers."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // self.ep

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """The ranks that return results: the last stage's first tensor ranks, ordered by dp, then
        cp. Exactly one of them returns each token's result."""
        return tuple(
            self.rank(dp=dp, cp=cp, pp=self.pp - 1)
            for dp in range(self.dp)
            for cp in range(self.cp)
        )

    def size(self, axis: Axis) -> int:
        """Size of an axis."""
        return int(getattr(self, axis))

    def rank(self, *, dp: int = 0, tp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """The rank at the coordinates `dp`, `tp`, `pp` and `cp`, each from 0.

        Raises:
            LayoutError: a coordinate is outside of the layout.
        """
        for axis, index in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
            if not 0 <= index < getattr(self, axis):
                raise LayoutError(
                    f"there is no {axis} {index}: the layout has {getattr(self, axis)}, counted "
                    "from 0",
                    field=axis,
                )
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def coordinates(self, rank: int) -> Coordinates:
        """A rank's coordinates. Raises `LayoutError` for a rank outside of the layout."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"there is no rank {rank}: the layout has {self.world_size}, counted from 0",
                field="rank",
            )
        pp, in_stage = divmod(rank, self.tp * self.cp * self.dp)
        rest, tp = divmod(in_stage, self.tp)
        dp, cp = divmod(rest, self.cp)
        expert_dp, ep = divmod(in_stage, self.ep)
        return Coordinates(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, expert_dp=expert_dp)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Every set of ranks that differ along `axes` only, sorted by rank.

        Activations are all-reduced over `groups("tp")`, gradients over `groups("dp", "cp")`.

        Raises:
            LayoutError: `axes` mixes axes of dense layers and axes of expert layers.
        """
        order = _order_of(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            own = self.coordinates(rank)
            key = tuple(getattr(own, axis) for axis in order if axis not in axes)
            found.setdefault(key, []).append(rank)
        return tuple(sorted(tuple(ranks) for ranks in found.values()))

    def describe(self) -> str:
        """The axes with a size above 1, such as `dp=2 tp=2`."""
        named = [f"{name}={self.size(name)}" for name in self.axes_used()]
        return " ".join(named) or "one rank"

    def axes_used(self) -> tuple[Axis, ...]:
        """The axes with a size above 1."""
        return tuple(axis for axis in AXES if self.size(axis) > 1)


def _order_of(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    for order in (DENSE_AXES, EXPERT_AXES):
        if set(axes) <= set(order):
            return order
    raise LayoutError(
        f"there is no group along {', '.join(axes)}: use axes of {', '.join(DENSE_AXES)} only, or "
        f"of {', '.join(EXPERT_AXES)} only",
        field="axes",
    )
