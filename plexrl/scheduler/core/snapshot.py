"""Snapshots: the core's whole state as bytes, which replaces the events before it.

    {"version": 2, "settings": {...}, "state": {...}, "timers": [...], ...}   (msgpack)

Records are encoded by field name, as their annotations say: a new field needs no change here, and a
missing one gets its default. The rest of `Context` belongs to one call, or is derived from the
state. The settings are those in force at the time of the snapshot: the events after it were decided
under them.
"""

from typing import Any, get_type_hints

import msgspec

from plexrl.errors import StorageError
from plexrl.scheduler.config import SchedulerConfig, core_settings, with_core_settings
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.core.snapshot_versions import from_version_1
from plexrl.wire.codec import restore_annotations

VERSION = 2
"""Incremented when a change of a record makes older snapshots unreadable."""

_KEPT = ("state", "timers", "timer_at")


def encode(context: Context) -> bytes:
    """The snapshot of `context` between two events."""
    waiting = context.waiting
    to_do = (context.commands, context.discards, context.dirty, context.cycles_over)
    assert not any((*to_do, waiting.must_retry, waiting.newcomers)), "a snapshot inside an event"
    kept = {name: getattr(context, name) for name in _kept_fields()}
    head = {"version": VERSION, "settings": core_settings(context.config)}
    return msgspec.msgpack.encode({**head, **kept})


def decode(body: bytes, config: SchedulerConfig) -> Context:
    """The context of a snapshot; `config` gives the settings that are not the core's.

    Raises:
        StorageError: another version of PlexRL wrote it.
    """
    try:
        head = msgspec.msgpack.decode(body, type=_Head)
        if head.version == 1:
            body = from_version_1(body)
        elif head.version != VERSION:
            raise StorageError(
                f"the snapshot has format {head.version}; this version reads 1 and {VERSION}: "
                "use the version of PlexRL that wrote it",
                version=head.version,
            )
        # The version is checked before the other fields, so that the error names it.
        raw = msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw])
        found: dict[str, Any] = {
            name: msgspec.msgpack.decode(raw[name], type=hint)
            for name, hint in _kept_fields().items()
            if name in raw
        }
    except (ValueError, RecursionError) as error:
        raise StorageError(f"the snapshot cannot be read: {error}") from error
    return Context(config=with_core_settings(config, head.settings), **found)


class _Head(msgspec.Struct):
    version: int
    settings: dict[str, Any]


def _kept_fields() -> dict[str, Any]:
    """Name and type of each part of a snapshot."""
    restore_annotations(Context)
    hints = get_type_hints(Context)
    return {name: hints[name] for name in _KEPT}
