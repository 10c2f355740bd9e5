"""Snapshots of earlier formats, rewritten to the present one."""

from typing import Any, Final

import msgspec

from plexrl.scheduler.state.messages.timers import parse

_PARTS: Final[dict[str, dict[str, str]]] = {
    "burst": {
        "burst_started_at": "started_at",
        "burst_tokens": "tokens",
        "burst_ended_at": "ended_at",
        "served_at": "served_at",
        "idle_since": "idle_since",
        "wants_since": "wants_since",
    },
    "processes": {
        "incarnation": "incarnation",
        "addresses": "addresses",
        "endpoints": "endpoints",
        "ready_at": "ready_at",
        "failures": "failures",
        "launch_at": "launch_at",
    },
    "moves": {
        "relocation": "planned",
        "no_move_until": "not_before",
        "moves": "count",
        "moved_at": "last_at",
        "moved_because": "last_reason",
    },
    "stored": {
        "state_nodes": "nodes",
        "awaited_nodes": "awaited_nodes",
        "nvme_bytes": "nvme_bytes",
        "nvme_bytes_by_node": "nvme_bytes_by_node",
    },
    "cycles": {
        "cycle": "open",
        "cycles": "measured",
        "cycles_seen": "seen",
        "waiting_part": "waiting_part",
        "publishes": "publishes",
    },
    "replay": {
        "log": "log",
        "past": "past",
        "past_payload_bytes": "past_payload_bytes",
        "past_is_whole": "past_is_whole",
        "previous_seq": "previous_seq",
        "replaying": "replaying",
        "completed_seq": "completed_seq",
        "durable_seq": "durable_seq",
    },
    "switch_times": {"switch_began_at": "began_at", "switch_ended_at": "ended_at"},
    "backoff": {
        "held_back_until": "until",
        "held_back_reason": "reason",
        "held_code": "code",
        "held_since": "since",
        "held_count": "tries",
    },
}
"""Fields of a deployment in version 1 that are fields of one of its parts in version 2."""


def from_version_1(body: bytes) -> bytes:
    """A snapshot of version 1 as one of version 2: timers are typed values, and a deployment has
    parts.

    Raises:
        ValueError: it is no snapshot of version 1.
    """
    found = msgspec.msgpack.decode(body, type=dict[str, Any])
    try:
        found["version"] = 2
        found["timers"] = [[at, parse(text)] for at, text in found["timers"]]
        for deployment in found["state"].get("deployments", {}).values():
            for part, fields in _PARTS.items():
                deployment[part] = {
                    new: deployment.pop(old) for old, new in fields.items() if old in deployment
                }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    return msgspec.msgpack.encode(found)
