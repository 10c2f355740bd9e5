"""Versions that another StateManager reads: pinned in host memory while its connection lasts.

A pin keeps the bytes only. A later save may replace or drop the version; its memory still counts
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
    """Pin versions for another StateManager; the caller must close the descriptors.

    Raises:
        StateTierFullError: one was spilled, and the host tier has no space for it.
        CorruptStateError: one was spilled and is damaged.
    """
    pinned: list[PinnedVersion] = []
    places: dict[int, int] = {}
    # The reader cannot verify data on NVMe, so a spilled version is loaded to memory first.
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
