"""What tenants may have stored: looked at before anything changes, what is on its way included."""

from collections.abc import Iterable
from typing import NamedTuple

from plexrl.errors import QuotaExceededError
from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.eviction.tenant_limit import TenantLimit
from plexrl.statemanager.host.allocations import HostLoans, HostState
from plexrl.statemanager.store.catalog import Catalog
from plexrl.statemanager.store.objects import StoredObject, Version, share_keys
from plexrl.statemanager.store.versions.versions import Manifest

HOST, NVME = TierName.HOST, TierName.NVME
_UNLIMITED = TenantLimit()


class _Coming(NamedTuple):
    """A version that is being stored."""

    manifest: Manifest
    superseded: frozenset[str]
    host_allowed: bool


class TenantQuotas:
    """Thread-safe, by the catalog's lock."""

    def __init__(self, config: StateManagerConfig, catalog: Catalog, loans: HostLoans) -> None:
        self.limits: dict[str, TenantLimit] = dict(config.tenant_limits)
        """Of tenants that have one of their own; may be changed at any time."""
        self._usual_limit = TenantLimit(
            total_bytes=config.tenant_bytes_max, host_bytes=config.tenant_host_bytes_max
        )
        self._catalog = catalog
        self._loans = loans
        self._coming: dict[int, _Coming] = {}
        """By ordinal: what counts before it has its name."""

    def begin(self, manifest: Manifest, superseded: frozenset[str], *, host_allowed: bool) -> None:
        """Count a version, which has its ordinal, until `end`. The lock is held since the check."""
        self._coming[manifest.ordinal] = _Coming(manifest, superseded, host_allowed)

    def end(self, manifest: Manifest) -> None:
        """The version has its name, or will not get it."""
        with self._catalog.lock:
            del self._coming[manifest.ordinal]

    def check_loan(self, state: HostState) -> None:
        """Refuse host memory for a rank to work in.

        Raises:
            QuotaExceededError: its tenant may not have so much.
        """
        limit = self._limit(state.tenant)
        nbytes = state.nbytes
        with self._catalog.lock:
            held = {tier: self._taken(state.tenant, tier) for tier in (HOST, None)}
        for tier, most in ((HOST, limit.host_bytes), (None, limit.total_bytes)):
            if most is not None and held[tier] + nbytes > most:
                raise QuotaExceededError(
                    f"{nbytes} bytes lent to {state.owner!r} would bring what tenant "
                    f"{state.tenant!r} has here to {held[tier] + nbytes} of {most}: release a job "
                    "of it, raise its quota, or leave the optimizer's state on the device",
                    tenant=state.tenant,
                    needed_bytes=nbytes,
                )

    def check(self, manifest: Manifest, superseded: frozenset[str], lent_bytes: int = 0) -> bool:
        """Whether a version may go to host. `lent_bytes` of it are lent, and count already. The
        lock is held.

        Raises:
            QuotaExceededError: it would be more than its tenant may have in both tiers.
        """
        limit = self._limit(manifest.tenant)
        if limit == _UNLIMITED:
            return True
        coming = [c for c in self._coming.values() if self._is_coming(c, manifest.tenant)]
        leaving = {manifest.name, *superseded}
        leaving.update(*({c.manifest.name, *c.superseded} for c in coming))
        held = {tier: self._taken(manifest.tenant, tier, leaving) for tier in (HOST, None)}
        total = manifest.nbytes + held[None] - lent_bytes
        total += _beside(manifest, [c.manifest for c in coming])
        if limit.total_bytes is not None and total > limit.total_bytes:
            raise QuotaExceededError(
                f"{manifest.description} would bring what tenant {manifest.tenant!r} has stored "
                f"here to {total} of {limit.total_bytes} bytes: release a job of this tenant or "
                "raise its quota; the state stays where it was",
                tenant=manifest.tenant,
                needed_bytes=manifest.nbytes,
            )
        in_host = _beside(manifest, [c.manifest for c in coming if c.host_allowed])
        in_host += held[HOST] + manifest.nbytes - lent_bytes
        return limit.host_bytes is None or in_host <= limit.host_bytes

    def has_host_room(self, version: Version) -> bool:
        """Whether a version on NVMe may come to host."""
        manifest = version.manifest
        limit = self._limit(manifest.tenant).host_bytes
        if limit is None:
            return True
        with self._catalog.lock:
            return self._taken(manifest.tenant, HOST) + manifest.nbytes <= limit

    def is_exceeded(self, tenant: str) -> bool:
        """Whether a tenant has more than it may. The lock is held."""
        limit = self._limit(tenant)
        return any(
            most is not None and self._taken(tenant, tier) > most
            for tier, most in ((HOST, limit.host_bytes), (None, limit.total_bytes))
        )

    def used_by(self, tenant: str) -> dict[TierName, int]:
        """Bytes that a tenant's versions take in each tier, replicas once. A version in host with a
        copy on NVMe counts in both."""
        with self._catalog.lock:
            return {tier: self._taken(tenant, tier) for tier in TierName}

    def _limit(self, tenant: str) -> TenantLimit:
        return self.limits.get(tenant, self._usual_limit)

    def _is_coming(self, coming: _Coming, tenant: str) -> bool:
        """Whether a version of the tenant's is being stored and does not have its name yet."""
        manifest = coming.manifest
        there = self._catalog.current.get(manifest.name)
        has_name = there is not None and there.manifest.ordinal == manifest.ordinal
        return manifest.tenant == tenant and not has_name

    def _taken(self, tenant: str, tier: TierName | None, without: Iterable[str] = ()) -> int:
        """What a tenant's versions take in a tier; absent: in any, each object once."""
        leaving = frozenset(without)
        objects: set[StoredObject] = set()
        headers = 0
        for name, version in self._catalog.current.items():
            if version.manifest.tenant != tenant or name in leaving:
                continue
            if tier is None:
                objects.update(version.objects)
            elif tier in version.header_bytes:
                headers += version.header_bytes[tier]
                objects.update(version.objects)
        lent = 0 if tier == NVME else self._loans.lent_bytes(tenant)
        if tier is None:
            return lent + sum(found.nbytes for found in objects)
        return lent + headers + sum(found.bytes_in(tier) for found in objects)


def _beside(manifest: Manifest, coming: Iterable[Manifest]) -> int:
    """Bytes that versions on their way bring beyond what `manifest` has too, replicas once."""
    sections: dict[object, int] = {}
    for other in coming:
        for section, key in zip(other.sections, share_keys(other), strict=True):
            sections[key or (other.ordinal, section.start)] = section.nbytes
    own = set(share_keys(manifest))
    return sum(nbytes for key, nbytes in sections.items() if key not in own)
