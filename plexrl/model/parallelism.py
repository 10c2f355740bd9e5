"""How a model is laid over the ranks of a deployment: axes, coordinates, groups. Pure.

Axes: `dp` data (other rows), `tp` tensor (a part of every matrix), `pp` pipeline (a part of the
layers), `cp` context (a part of every row), `ep` expert (some of a layer's experts).

Ranks are numbered with tp fastest, then cp, dp, pp: the order `tp-cp-ep-dp-pp` of megatron-core
(`parallel_state.py`), so neighbours that talk most share a node. As there, experts have axes of
their own over the same ranks: within a pipeline stage the dp·cp block of a tensor rank is read
again as ep (fastest) times expert_dp, and expert matrices are cut by tp like the others. Hence
ep divides dp·cp and takes no ranks of its own.
"""

from dataclasses import dataclass
from typing import Literal

from plexrl.errors import LayoutError

Axis = Literal["dp", "tp", "pp", "cp", "ep", "expert_dp"]

DENSE_AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
"""Of all that is no expert, the fastest first."""

EXPERT_AXES: tuple[Axis, ...] = ("tp", "ep", "expert_dp", "pp")
"""The same ranks, as the experts' layers see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on every axis."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    expert_dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The size of every axis; checked when it is made.

    Raises:
        LayoutError: `details["field"]` names the axis that cannot be.
    """

    dp: int = 1
    """Ranks that get different rows."""
    tp: int = 1
    """Parts of each matrix."""
    pp: int = 1
    """Stages of layers."""
    cp: int = 1
    """Parts of each row."""
    ep: int = 1
    """Parts of each layer's experts; divides dp·cp."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(
                    f"parallelism.{name} is {size!r}: it must be a whole number, at least 1",
                    field=name,
                )
        if self.dp * self.cp % self.ep:
            raise LayoutError(
                f"parallelism.ep is {self.ep} and dp·cp is {self.dp * self.cp}: experts are spread "
                "over the data and context ranks, so ep must divide dp·cp",
                field="ep",
            )

    @classmethod
    def from_text(cls, text: str) -> "Parallelism":
        """A layout from a `text` as a command line has it: `dp=2,tp=2`; axes left out are 1 long.

        Raises:
            LayoutError: it is not written so, or cannot be.
        """
        sizes: dict[str, int] = {}
        for part in text.replace(" ", ",").split(","):
            axis, _, size = part.partition("=")
            if axis not in ("dp", "tp", "pp", "cp", "ep") or axis in sizes or not size.isdecimal():
                raise LayoutError(
                    f"{part!r} in layout {text!r} is no axis with its size: write it as dp=2,tp=2, "
                    "each of dp, tp, pp, cp, ep at most once",
                    field="layout",
                )
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        """Ranks, which is workers."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts and see other tokens."""
        return self.dp * self.cp // self.ep

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """The ranks whose results count: the last stage's first tensor ranks, in the order of dp
        and within it of cp. Each token's result comes from exactly one of them."""
        return tuple(
            self.rank(dp=dp, cp=cp, pp=self.pp - 1)
            for dp in range(self.dp)
            for cp in range(self.cp)
        )

    def size(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return int(getattr(self, axis))

    def rank(self, *, dp: int = 0, tp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """The rank at the coordinates `dp`, `tp`, `pp` and `cp`, each from 0.

        Raises:
            LayoutError: they are outside of the layout.
        """
        for axis, place in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
            if not 0 <= place < getattr(self, axis):
                raise LayoutError(
                    f"there is no {axis} {place}: the layout has {getattr(self, axis)}", field=axis
                )
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is. Raises `LayoutError` outside of the layout."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"there is no rank {rank}: the layout has {self.world_size}", field="rank"
            )
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        expert_dp, ep = divmod(dp * self.cp + cp, self.ep)
        return Coordinates(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, expert_dp=expert_dp)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Every set of ranks that differ along `axes` only, each and all in the order of ranks.

        `groups("tp")` share an all-reduce of activations, `groups("dp", "cp")` one of gradients.

        Raises:
            LayoutError: an axis of the dense layers beside one of the experts' only.
        """
        order = _order_of(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = self.coordinates(rank)
            key = tuple(getattr(places, axis) for axis in order if axis not in axes)
            found.setdefault(key, []).append(rank)
        return tuple(sorted(tuple(ranks) for ranks in found.values()))

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The one of `groups(*axes)` that a rank belongs to."""
        return next(ranks for ranks in self.groups(*axes) if rank in ranks)

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same part of the dense parameters as `rank`, itself included. A
        backend that shards its state (FSDP, a distributed optimizer) shards it among these."""
        return self.group(rank, "dp", "cp")

    def expert_replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same part of the experts' parameters as `rank`, itself included."""
        return self.group(rank, "expert_dp")

    def is_output(self, rank: int) -> bool:
        """Whether a rank is one of `output_ranks`."""
        places = self.coordinates(rank)
        return places.pp == self.pp - 1 and places.tp == 0

    def describe(self) -> str:
        """`dp=2 tp=2`: the axes longer than 1."""
        named = [f"{name}={self.size(name)}" for name in self.axes_used()]
        return " ".join(named) or "one rank"

    def axes_used(self) -> tuple[Axis, ...]:
        """The axes longer than 1."""
        axes: tuple[Axis, ...] = ("dp", "tp", "pp", "cp", "ep")
        return tuple(axis for axis in axes if self.size(axis) > 1)


def _order_of(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    for order in (DENSE_AXES, EXPERT_AXES):
        if set(axes) <= set(order):
            return order
    raise LayoutError(
        f"no group runs along {', '.join(axes)}: use axes of {', '.join(DENSE_AXES)} together, or "
        f"of {', '.join(EXPERT_AXES)}",
        field="axes",
    )
