"""Where the GPU-hours of a run went, and how it ended. Pure.

Every GPU is in one of seven states at any time until the drain, so their GPU-hours sum to the
cluster's. GPUs in a group that neither work nor switch are *held idle*; a group that was formed for
rollouts counts as one of rollouts, also while others share it.

The *tail* begins when the last job gets its first GPUs: from then on no job waits that could use
free GPUs, and a scheduler can only let the running jobs end sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHours:
    """GPU-hours of the cluster until the drain."""

    rollouts_work: float = 0.0
    """Rollouts run; 0 if they run outside of the cluster."""
    training_works: float = 0.0
    """Training runs, including work repeated after failures."""
    switches: float = 0.0
    """States move."""
    filled: float = 0.0
    """Preemptible deployments generate usefully in idle time."""
    rollout_gpus_idle: float = 0.0
    """Groups of rollouts hold GPUs that do none of these."""
    training_gpus_idle: float = 0.0
    """Groups of training do."""
    unallocated: float = 0.0
    """No group has the GPUs."""
    unallocated_tail: float = 0.0
    """Part of `unallocated` that falls into the tail."""
    unallocated_kept: float = 0.0
    """Part of `unallocated` that waited for a job, by its reservation or because nobody may pass
    it, while one that needs no more GPUs than were free waited behind it. An upper bound of what
    backfilling could have used: whether these GPUs suited the other job was not tried."""

    @property
    def total(self) -> float:
        """All GPU-hours of the cluster."""
        return sum(hours for _, hours in self.parts())

    def parts(self) -> tuple[tuple[str, float], ...]:
        """(name, GPU-hours) of each state; together they are the total."""
        return (
            ("rollouts work", self.rollouts_work),
            ("training works", self.training_works),
            ("switches", self.switches),
            ("fillers work", self.filled),
            ("rollout GPUs held idle", self.rollout_gpus_idle),
            ("training GPUs held idle", self.training_gpus_idle),
            ("unallocated", self.unallocated),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The time from the last job's first GPUs to the drain."""

    seconds: float = 0.0
    part: float = 0.0
    """Part of the drain time."""
    held: float = 0.0
    """Part of the cluster's GPUs that are in groups during the tail."""
    works: float = 0.0
    """Part that works."""


def tail_of(
    utilisation: Sequence[tuple[float, float, float]], drain_s: float, since_s: float
) -> Tail:
    """The tail from a run's series of (start of the bin, part in groups, part that works). A bin
    that the tail begins in counts by its part after the beginning, at the bin's mean."""
    seconds = drain_s - since_s
    if seconds <= 0.0:
        return Tail()
    ends = [start_s for start_s, _, _ in utilisation[1:]] + [drain_s]
    held = works = 0.0
    for (start_s, part_held, part_works), end_s in zip(utilisation, ends, strict=True):
        length_s = max(0.0, min(end_s, drain_s) - max(start_s, since_s))
        held += part_held * length_s
        works += part_works * length_s
    return Tail(
        seconds=seconds,
        part=seconds / drain_s,
        held=min(held / seconds, 1.0),
        works=min(works / seconds, 1.0),
    )


def kept_sentence(where: GpuHours) -> str:
    """The GPU-hours that are kept for jobs, in one line; empty if there are none."""
    if not where.unallocated_kept:
        return ""
    part = where.unallocated_kept / where.total
    return (
        f"{where.unallocated_kept:,.0f} GPU-h ({part:.1%}) are free GPUs that are kept for the "
        "first job of the queue while a smaller one waits"
    )


def tail_sentence(tail: Tail) -> str:
    """The tail in one line."""
    if tail.seconds <= 0.0:
        return "No tail: the last job got its GPUs as the run ended."
    hours = tail.seconds / HOUR_S
    return (
        f"the last {100 * tail.part:.0f} % of the drain ({hours:,.1f} h) is the tail, in which no "
        f"job waits for its first GPUs: {100 * tail.held:.0f} % of the GPUs are in groups and "
        f"{100 * tail.works:.0f} % work"
    )
