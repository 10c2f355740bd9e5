"""Versions that another StateManager reads: pinned in host memory while its connection lasts.

A pin holds the bytes, not the name. A later save may replace or drop the version; its memory counts
in the tier until the pin ends.
"""

import os
from contextlib import ExitStack
from dataclasses import replace

from plexrl.statemanager.checkpoint.requests import PinnedVersion
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.versions import VersionKind


def pin_for_other(
    held: ExitStack, store: Store, deployment: str, seq: int
) -> tuple[list[PinnedVersion], list[int]]:
    """What another StateManager needs to read the versions, and descriptors that it must close.

    Raises:
        StateTierFullError: one was spilled, and the host tier cannot take it back.
        CorruptStateError: one was spilled and is damaged.
    """
    pinned: list[PinnedVersion] = []
    places: dict[int, int] = {}
    # What lies on NVMe could not be verified by its reader, so it comes to memory first.
    found = store.find(
        lambda m: (m.deployment, m.seq, m.kind) == (deployment, seq, VersionKind.STATE)
    )
    for version in found:
        name, description = version.manifest.name, version.manifest.description
        lease = held.enter_context(store.lease_in_memory(name, description))
        regions = tuple(
            replace(region, fd=places.setdefault(region.fd, len(places)))
            for region in lease.regions
        )
        pinned.append(PinnedVersion(manifest=lease.manifest, regions=regions))
    return pinned, [os.dup(fd) for fd in places]
