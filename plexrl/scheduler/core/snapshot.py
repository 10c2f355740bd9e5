"""Snapshots: the core's whole state as bytes, which replaces the events before it.

    {"version": 7, "settings": {...}, "state": {...}, "timers": [...], ...}   (msgpack)

Records are encoded by field name, as their annotations say: a new field needs no change here, and a
missing one gets its default. The rest of `Context` belongs to one call, or is derived from the
state. The settings are those in force at the time of the snapshot: the events after it were decided
under them.
"""

from typing import Any

import msgspec

from plexrl.errors import StorageError
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.rules.config import SchedulerConfig, core_settings, with_core_settings
from plexrl.scheduler.state.messages.earlier import upgrade_state
from plexrl.scheduler.state.messages.timers import Timer
from plexrl.scheduler.state.records import State
from plexrl.wire.codec import restore_annotations

VERSION = 7
"""Incremented when a change of a record makes older snapshots unreadable."""
EARLIER = (2, 3, 4, 5, 6)
"""Former versions that are still read."""


def encode(context: Context) -> bytes:
    """The snapshot of `context` between two events."""
    effects, waiting = context.effects, context.cluster.queues.waiting
    to_do = (effects.commands, effects.discards, effects.dirty, effects.cycles_over)
    assert not any((*to_do, waiting.must_retry, waiting.newcomers)), "a snapshot inside an event"
    restore_annotations(State)
    return msgspec.msgpack.encode(
        {
            "version": VERSION,
            "settings": core_settings(context.settings.config),
            "state": context.state,
            "timers": effects.timers,
            "timer_at": effects.timer_at,
        }
    )


def decode(body: bytes, config: SchedulerConfig) -> Context:
    """The context of a snapshot; `config` gives the settings that are not the core's.

    Raises:
        StorageError: another version of PlexRL wrote it.
    """
    try:
        head = msgspec.msgpack.decode(body, type=_Head)
        if head.version not in (*EARLIER, VERSION):
            raise StorageError(
                f"the snapshot has format {head.version}; this version reads {EARLIER[0]} to "
                f"{VERSION}: use the version of PlexRL that wrote it",
                version=head.version,
            )
        # The version is checked before the other fields, so that the error names it.
        restore_annotations(State)
        if head.version in EARLIER:
            plain = msgspec.msgpack.decode(body, type=dict[str, Any])
            upgrade_state(plain["state"], head.version)
            found = msgspec.convert(plain, _Snapshot)
        else:
            found = msgspec.msgpack.decode(body, type=_Snapshot)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"the snapshot cannot be read: {error}") from error
    context = Context(with_core_settings(config, head.settings), found.state)
    context.effects.timers, context.effects.timer_at = found.timers, found.timer_at
    return context


class _Head(msgspec.Struct):
    version: int
    settings: dict[str, Any]


class _Snapshot(msgspec.Struct):
    state: State
    timers: list[Timer] = msgspec.field(default_factory=list)
    timer_at: float | None = None
