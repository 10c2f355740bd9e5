"""Which checkpoints of a job may go. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What is kept; whatever no field keeps is deleted. Both absent: everything is kept."""

    keep_last: int | None = None
    """The newest so many."""
    keep_every: int | None = None
    """Those at a multiple of so many steps."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointAge:
    """A complete checkpoint, as the policy sees it."""

    step: int
    written_ns: int
    """When it was published; of two of one step the later is the newer."""
    name: str
    is_pinned: bool = False
    """To be kept by the user's word, or in use."""


def deletable(
    checkpoints: Iterable[CheckpointAge], policy: RetentionPolicy
) -> tuple[CheckpointAge, ...]:
    """Those that the policy lets go, the oldest first; never the newest one."""
    if policy.keep_last is None and policy.keep_every is None:
        return ()
    by_age = sorted(checkpoints)
    newest = by_age[-max(1, policy.keep_last or 0) :]
    return tuple(
        checkpoint
        for checkpoint in by_age[: len(by_age) - len(newest)]
        if not checkpoint.is_pinned
        and (policy.keep_every is None or checkpoint.step % policy.keep_every != 0)
    )
