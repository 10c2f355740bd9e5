"""Where a deployment is: its groups, ranks and nodes, and the time that is reserved for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.ids import GroupId, NodeId
from plexrl.scheduler.state.demand.reservation import Reservation
from plexrl.wire.messages import RankPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord:
    """How a deployment was placed on its group, for `explain`."""

    at: float
    way: str
    group: GroupId
    members: int
    """Members of the group, including this one."""
    by_prior: bool = False
    """The demand of one of them was that of others like it, which tenants are not told."""
    shift_s: float
    """Micro-shift δ: seconds from `at` to the start of the first reserved cycle."""
    setup_s: float
    """Estimated seconds to load its state onto the GPUs."""
    overlap_s: float
    """Planned seconds of a cycle in which another member is busy too."""
    interference_s: float
    contention: float | None = None
    """Predicted waiting / (waiting + running), averaged over the group's members including this
    one; None if a member's demand was unknown."""


@dataclass(slots=True, kw_only=True)
class Placement:
    """The GPUs of a deployment."""

    groups: tuple[GroupId, ...] = ()
    """The groups that it is on, in the order of its ranks; several if it *spans* them. It runs only
    while it has the locks of all. Empty: it has no GPUs."""
    ranks: tuple[RankPlacement, ...] = ()
    nodes: tuple[NodeId, ...] = ()
    """Nodes of its ranks, without repetition, sorted by name."""
    reservation: Reservation | None = None
    record: PlacementRecord | None = None

    @property
    def group(self) -> GroupId | None:
        """The group of its first ranks; None: it has no GPUs."""
        return self.groups[0] if self.groups else None

    @property
    def spans(self) -> bool:
        """Whether it is on several groups."""
        return len(self.groups) > 1

    def put_on(self, groups: tuple[GroupId, ...], gpus: Sequence[RankPlacement]) -> None:
        """It is on these groups, with a rank on each of their GPUs."""
        self.groups = groups
        self.ranks = tuple(
            RankPlacement(rank=rank, node=gpu.node, gpu=gpu.gpu) for rank, gpu in enumerate(gpus)
        )
        self.nodes = tuple(sorted({gpu.node for gpu in gpus}))

    def replace(self, before: tuple[GroupId, ...], after: tuple[GroupId, ...]) -> None:
        """Borders have moved: its adjacent groups `before` are now `after`, with the same GPUs."""
        at = self.groups.index(before[0])
        self.groups = (*self.groups[:at], *after, *self.groups[at + len(before) :])

    def reserve(self, reservation: Reservation) -> None:
        """This time of its groups is reserved for it."""
        self.reservation = reservation

    def note(self, record: PlacementRecord) -> None:
        """Keep how it was placed."""
        self.record = record

    def leave(self) -> None:
        """It is on no group; its processes may still run on the GPUs of its ranks."""
        self.groups = ()
        self.reservation = None

    def clear(self) -> None:
        """Its processes have left the GPUs."""
        self.ranks = ()
        self.nodes = ()
        self.record = None
