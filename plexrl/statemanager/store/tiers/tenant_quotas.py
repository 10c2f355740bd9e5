"""Per-tenant quotas, checked before anything changes; versions being stored count."""

from collections.abc import Iterable
from typing import NamedTuple

from plexrl.errors import QuotaExceededError
from plexrl.statemanager.config import StateManagerConfig, TenantLimit
from plexrl.statemanager.layout.versions import Manifest
from plexrl.statemanager.store.objects import SharedObject, Version, share_keys
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.host.allocations import HostAllocations, HostState
from plexrl.statemanager.store.versions.catalog import Catalog

HOST, NVME = TierName.HOST, TierName.NVME
_UNLIMITED = TenantLimit()


class _PendingVersion(NamedTuple):
    """A version that is being stored."""

    manifest: Manifest
    superseded: frozenset[str]
    host_allowed: bool


class TenantQuotas:
    """Quotas and usage per tenant. Thread-safe: the catalog's lock guards the state."""

    def __init__(
        self, config: StateManagerConfig, catalog: Catalog, host_allocations: HostAllocations
    ) -> None:
        self.limits: dict[str, TenantLimit] = dict(config.tenant_limits)
        """Quotas of single tenants; may change at any time."""
        self._usual_limit = TenantLimit(
            total_bytes=config.tenant_bytes_max, host_bytes=config.tenant_host_bytes_max
        )
        self._catalog = catalog
        self._host_allocations = host_allocations
        self._pending: dict[int, _PendingVersion] = {}
        """Versions that count before they have a header, by ordinal."""

    def begin(self, manifest: Manifest, superseded: frozenset[str], *, host_allowed: bool) -> None:
        """Count a version until `end`. The caller has held the lock since `check`."""
        self._pending[manifest.ordinal] = _PendingVersion(manifest, superseded, host_allowed)

    def end(self, manifest: Manifest) -> None:
        """Stop counting a version that is stored or failed."""
        with self._catalog.lock:
            del self._pending[manifest.ordinal]

    def check_allocation(self, state: HostState) -> None:
        """Check the quota for a host-memory allocation.

        Raises:
            QuotaExceededError: the tenant's quota is too small.
        """
        limit = self._limit(state.tenant)
        nbytes = state.nbytes
        with self._catalog.lock:
            used = {tier: self._used_bytes(state.tenant, tier) for tier in (HOST, None)}
        for tier, most in ((HOST, limit.host_bytes), (None, limit.total_bytes)):
            if most is not None and used[tier] + nbytes > most:
                raise QuotaExceededError(
                    f"{nbytes} bytes of host memory for {state.owner!r} would raise the usage of "
                    f"tenant {state.tenant!r} to {used[tier] + nbytes} of {most}: release one of "
                    "its jobs, raise its quota, or leave the optimizer's state on the device",
                    tenant=state.tenant,
                    needed_bytes=nbytes,
                )

    def check(self, manifest: Manifest, superseded: frozenset[str], donated_bytes: int = 0) -> bool:
        """Whether a version may be stored in the host tier. `donated_bytes` of it are counted as an
        allocation already. The lock is held.

        Raises:
            QuotaExceededError: the tenant's total quota is too small.
        """
        limit = self._limit(manifest.tenant)
        if limit == _UNLIMITED:
            return True
        pending = [c for c in self._pending.values() if self._is_pending(c, manifest.tenant)]
        leaving = {manifest.name, *superseded}
        leaving.update(*({c.manifest.name, *c.superseded} for c in pending))
        used = {tier: self._used_bytes(manifest.tenant, tier, leaving) for tier in (HOST, None)}
        total = manifest.nbytes + used[None] - donated_bytes
        total += _pending_bytes(manifest, [c.manifest for c in pending])
        if limit.total_bytes is not None and total > limit.total_bytes:
            raise QuotaExceededError(
                f"{manifest.description} would raise the usage of tenant {manifest.tenant!r} to "
                f"{total} of {limit.total_bytes} bytes: release a job of this tenant or raise its "
                "quota; the state stays where it was",
                tenant=manifest.tenant,
                needed_bytes=manifest.nbytes,
            )
        in_host = _pending_bytes(manifest, [c.manifest for c in pending if c.host_allowed])
        in_host += used[HOST] + manifest.nbytes - donated_bytes
        return limit.host_bytes is None or in_host <= limit.host_bytes

    def fits_host_quota(self, version: Version) -> bool:
        """Whether the tenant's host quota allows a promotion of this version."""
        manifest = version.manifest
        limit = self._limit(manifest.tenant).host_bytes
        if limit is None:
            return True
        with self._catalog.lock:
            return self._used_bytes(manifest.tenant, HOST) + manifest.nbytes <= limit

    def is_exceeded(self, tenant: str) -> bool:
        """Whether a tenant exceeds a quota. The lock is held."""
        limit = self._limit(tenant)
        return any(
            most is not None and self._used_bytes(tenant, tier) > most
            for tier, most in ((HOST, limit.host_bytes), (None, limit.total_bytes))
        )

    def used_by(self, tenant: str) -> dict[TierName, int]:
        """Bytes of a tenant's versions per tier, replicas counted once. A version with copies in
        both tiers counts in both."""
        with self._catalog.lock:
            return {tier: self._used_bytes(tenant, tier) for tier in TierName}

    def _limit(self, tenant: str) -> TenantLimit:
        return self.limits.get(tenant, self._usual_limit)

    def _is_pending(self, pending: _PendingVersion, tenant: str) -> bool:
        """Whether a version belongs to the tenant and is not in the catalog yet."""
        manifest = pending.manifest
        there = self._catalog.current.get(manifest.name)
        has_name = there is not None and there.manifest.ordinal == manifest.ordinal
        return manifest.tenant == tenant and not has_name

    def _used_bytes(self, tenant: str, tier: TierName | None, without: Iterable[str] = ()) -> int:
        """Bytes of a tenant in a tier; absent: in any tier, each object once."""
        leaving = frozenset(without)
        objects: set[SharedObject] = set()
        headers = 0
        for name, version in self._catalog.current.items():
            if version.manifest.tenant != tenant or name in leaving:
                continue
            if tier is None:
                objects.update(version.objects)
            elif tier in version.header_bytes:
                headers += version.header_bytes[tier]
                objects.update(version.objects)
        allocated = 0 if tier == NVME else self._host_allocations.allocated_bytes(tenant)
        if tier is None:
            return allocated + sum(found.nbytes for found in objects)
        return allocated + headers + sum(found.bytes_in(tier) for found in objects)


def _pending_bytes(manifest: Manifest, pending: Iterable[Manifest]) -> int:
    """Bytes of pending versions, without the sections that `manifest` shares; replicas once."""
    sections: dict[object, int] = {}
    for other in pending:
        for section, key in zip(other.sections, share_keys(other), strict=True):
            sections[key or (other.ordinal, section.start)] = section.nbytes
    own = set(share_keys(manifest))
    return sum(nbytes for key, nbytes in sections.items() if key not in own)
