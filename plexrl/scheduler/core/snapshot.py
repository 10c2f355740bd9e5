"""The core's whole state as bytes: what a journal may forget the events of.

    {"version": 2, "settings": {...}, "state": {...}, "timers": [...], ...}   (msgpack)

The state's records travel whole, by name and as their annotations say, so a new field needs no
change here; one that is missing gets its default. What else `Context` has is of one call, or is
made anew from the state. The settings are those in force at the time, for the events behind the
snapshot were decided under them.
"""

from typing import Any, get_type_hints

import msgspec

from plexrl.errors import StorageError
from plexrl.scheduler.config import SchedulerConfig, core_settings, with_core_settings
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.core.snapshot_versions import from_version_1
from plexrl.wire.codec import restore_annotations

VERSION = 2
"""Raised whenever a record changes so that an older snapshot would be misread."""

_KEPT = ("state", "timers", "timer_at")


def encode(context: Context) -> bytes:
    """`context` as it stands between two events."""
    to_do = (context.commands, context.discards, context.dirty, context.place_waiting)
    assert not any((*to_do, context.newcomers, context.cycles_over)), "a snapshot inside an event"
    kept = {name: getattr(context, name) for name in _kept_fields()}
    head = {"version": VERSION, "settings": core_settings(context.config)}
    return msgspec.msgpack.encode({**head, **kept})


def decode(body: bytes, config: SchedulerConfig) -> Context:
    """The context that `encode` made `body` from; `config` gives what is not the core's.

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
        # Raw first, so that a strange version is named and not a field it happens to have.
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
    """Name and type of each part."""
    restore_annotations(Context)
    hints = get_type_hints(Context)
    return {name: hints[name] for name in _KEPT}
