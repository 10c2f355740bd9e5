"""Conditions that currently block a part of the cluster, for operators: a code, a message, a time.

A condition is not an error: nothing is lost, and work continues when the condition ends.
"""

import time
from collections.abc import Callable
from typing import NotRequired, TypedDict

import msgspec

from plexrl.errors import PlexRLError


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One condition, as `/v1/health` and `/v1/status` show it."""

    code: str
    """Code of the error that requests get while the condition lasts."""
    message: str
    since: float
    """Seconds since the epoch."""


class ConditionView(TypedDict):
    """One condition in plain values."""

    code: str
    since: float
    message: NotRequired[str]
    """For operators only, because it may name paths, hosts and parts."""


class Conditions:
    """The conditions of one process, the oldest first."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._held: dict[str, Condition] = {}

    def hold(self, error: PlexRLError) -> None:
        """Record that the error's condition has begun or continues."""
        known = self._held.get(error.code)
        since = self._clock() if known is None else known.since
        self._held[error.code] = Condition(code=error.code, message=error.message, since=since)

    def clear(self, *codes: str) -> None:
        """Remove the conditions with these codes; without codes, all of them."""
        for code in codes or tuple(self._held):
            self._held.pop(code, None)

    def view(self) -> list[ConditionView]:
        """All conditions as plain values."""
        return [msgspec.to_builtins(condition) for condition in self._held.values()]
