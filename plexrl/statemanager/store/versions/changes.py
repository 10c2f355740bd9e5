"""Which deployments' state may have moved since when. Pure."""

from plexrl.statemanager.store.versions.versions import Manifest, VersionKind

GONE_MAX = 10_000
"""Deployments of which there is nothing any more and that are remembered; who asks so seldom that
more have gone meanwhile hears of the others when it connects anew."""


class Changes:
    """Numbers every change; the latest of each deployment is kept."""

    def __init__(self) -> None:
        self.serial = 0
        self._latest: dict[str, int] = {}

    def note(self, manifest: Manifest) -> None:
        """A version of this manifest came to a tier, or left one."""
        if manifest.kind != VersionKind.STATE:
            return
        self.serial += 1
        # The order of the dictionary is that of the changes.
        self._latest.pop(manifest.deployment, None)
        self._latest[manifest.deployment] = self.serial

    def since(self, serial: int) -> list[str]:
        """The deployments with a change after the one of that number, the latest first."""
        found = []
        for deployment, latest in reversed(self._latest.items()):
            if latest <= serial:
                break
            found.append(deployment)
        return found

    def forget(self, gone: list[str]) -> None:
        """Remember no more than `GONE_MAX` of those of which there is nothing any more."""
        for deployment in gone[GONE_MAX:]:
            self._latest.pop(deployment, None)
