"""Retention policy of a job's checkpoints. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Checkpoints to keep; all others are deleted. All fields absent: all are kept."""

    keep_last: int | None = None
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Keep the checkpoints at multiples of this number of steps."""
    bytes_max: int | None = None
    """Of those that these two keep, the oldest are deleted until the others have so many bytes."""
    prefix: str = ""
    """The policy is for checkpoints whose names are this and a number, the newest of which are
    those that were written last: after a step back, the numbers begin again. It keeps all others.
    Empty: it is for all, and the newest have the highest steps."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "bytes_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointAge:
    """Properties of a complete checkpoint that the policy uses."""

    step: int
    written_ns: int
    """Time of publication; orders checkpoints of one step."""
    name: str
    is_pinned: bool = False
    """Whether the user keeps it, or it is in use."""
    nbytes: int = 0
    """Of its files for `transformers` and to resume training."""


def deletable(
    checkpoints: Iterable[CheckpointAge], policy: RetentionPolicy
) -> tuple[CheckpointAge, ...]:
    """The checkpoints that the policy deletes, the oldest first; never the newest one."""
    if (policy.keep_last, policy.keep_every, policy.bytes_max) == (None, None, None):
        return ()
    if policy.prefix:
        series = [
            checkpoint for checkpoint in checkpoints if _is_of(checkpoint.name, policy.prefix)
        ]
        by_age = sorted(series, key=lambda each: (each.written_ns, each.step))
    else:
        by_age = sorted(checkpoints)
    gone = _beyond_count(by_age, policy)
    if policy.bytes_max is not None:
        gone |= _beyond_bytes([age for age in by_age if age not in gone], policy.bytes_max)
    return tuple(age for age in by_age if age in gone)


def _beyond_count(by_age: Sequence[CheckpointAge], policy: RetentionPolicy) -> set[CheckpointAge]:
    if policy.keep_last is None and policy.keep_every is None:
        return set()
    newest = by_age[-max(1, policy.keep_last or 0) :]
    return {
        checkpoint
        for checkpoint in by_age[: len(by_age) - len(newest)]
        if not checkpoint.is_pinned
        and (policy.keep_every is None or checkpoint.step % policy.keep_every != 0)
    }


def _beyond_bytes(kept: Sequence[CheckpointAge], bytes_max: int) -> set[CheckpointAge]:
    """The oldest of `kept` whose deletion leaves `bytes_max`, as far as they may be deleted."""
    gone = set()
    left = sum(each.nbytes for each in kept)
    for each in kept[:-1]:
        if left <= bytes_max:
            break
        if not each.is_pinned:
            gone.add(each)
            left -= each.nbytes
    return gone


def _is_of(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].isdecimal()
