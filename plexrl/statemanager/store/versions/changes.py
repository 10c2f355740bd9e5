"""A numbered log of the deployments whose state may have moved. Pure."""

from plexrl.statemanager.layout.versions import Manifest, VersionKind

GONE_MAX = 10_000
"""Deployments without state that stay in the log. A reader that misses more of them gets a full
report when it reconnects."""


class VersionChanges:
    """Numbers all changes; keeps the latest change of each deployment."""

    def __init__(self) -> None:
        self.serial = 0
        self._latest: dict[str, int] = {}

    def note(self, manifest: Manifest) -> None:
        """Record that a version entered or left a tier."""
        if manifest.kind != VersionKind.STATE:
            return
        self.serial += 1
        # The dictionary is ordered by change number.
        self._latest.pop(manifest.deployment, None)
        self._latest[manifest.deployment] = self.serial

    def since(self, serial: int) -> list[str]:
        """Deployments with a change after number `serial`, the latest change first."""
        found = []
        for deployment, latest in reversed(self._latest.items()):
            if latest <= serial:
                break
            found.append(deployment)
        return found

    def forget(self, gone: list[str]) -> None:
        """Keep at most `GONE_MAX` of the deployments without state."""
        for deployment in gone[GONE_MAX:]:
            self._latest.pop(deployment, None)
