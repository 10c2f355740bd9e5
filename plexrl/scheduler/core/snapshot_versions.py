"""Snapshots of earlier formats, rewritten to the present one."""

from typing import Any

import msgspec

from plexrl.scheduler.state.timers import parse


def from_version_1(body: bytes) -> bytes:
    """A snapshot of version 1 as one of version 2: timers are typed values.

    Raises:
        ValueError: it is no snapshot of version 1.
    """
    found = msgspec.msgpack.decode(body, type=dict[str, Any])
    found["version"] = 2
    found["timers"] = [[at, parse(text)] for at, text in found["timers"]]
    return msgspec.msgpack.encode(found)
