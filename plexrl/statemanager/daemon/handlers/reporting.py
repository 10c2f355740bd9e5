"""Memory usage, and the tiers in which state lies."""

import time
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from plexrl.statemanager.daemon.handlers.caller import (
    AGENTS,
    TICKETS,
    DaemonCaller,
    DaemonReply,
    handles,
)
from plexrl.statemanager.observe.health import Health
from plexrl.statemanager.protocol.messages import Answer, Usage, Where
from plexrl.statemanager.protocol.tickets import TicketRole
from plexrl.statemanager.store.tiers.eviction.policy import TierName


def _usage(caller: DaemonCaller, _: Usage, __: Sequence[int]) -> DaemonReply:
    config, store = caller.services.config, caller.services.store
    claims = caller.claims
    # A worker may not see other deployments, nor the usage of the tiers.
    own = None if claims.role == TicketRole.AGENT else claims.deployment
    deployments: dict[str, Answer] = {}
    tenants = set[str]()

    def entry(deployment: str) -> Answer:
        return deployments.setdefault(deployment, {"versions": [], "arena_bytes": {}})

    for version in store.find(lambda m: own in (None, m.deployment)):
        manifest = version.manifest
        entry(manifest.deployment)["versions"].append(
            {
                "rank": manifest.rank,
                "seq": manifest.seq,
                "kind": manifest.kind.value,
                "nbytes": manifest.nbytes,
                "world_size": manifest.world_size,
                "stamp": manifest.stamp,
                "token": manifest.token,
                "tier": version.tier.value,
                "tenant": manifest.tenant,
            }
        )
        tenants.add(manifest.tenant)
    for (deployment, rank), nbytes in caller.services.registry.resident_bytes().items():
        if own not in (None, deployment):
            continue
        entry(deployment)["arena_bytes"][str(rank)] = nbytes
    if own is not None:
        return DaemonReply({"node": config.node, "deployments": deployments})
    return DaemonReply(
        {
            "node": config.node,
            "host_bytes": store.used_bytes(TierName.HOST),
            "host_bytes_max": config.host_bytes,
            "host_resident_bytes": store.pool_bytes()[1],
            "host_prefault_bytes": config.prefault_bytes,
            "nvme_bytes": store.used_bytes(TierName.NVME),
            "nvme_bytes_max": config.nvme_bytes,
            "device": asdict(caller.services.devices.usage(0)),
            "deployments": deployments,
            "checkpoints": msgspec.to_builtins(caller.services.checkpoints.reports()),
            "tenants": {
                tenant: {
                    tier.value: nbytes for tier, nbytes in store.quotas.used_by(tenant).items()
                }
                for tenant in sorted(tenants)
            },
            "moves": [
                {"kind": move.kind, "who": move.who, "seconds": time.monotonic() - move.began}
                for move in caller.services.move_queue.running()
            ],
            "moves_waiting": caller.services.move_queue.waiting(),
        }
    )


def _where(caller: DaemonCaller, request: Where, _: Sequence[int]) -> DaemonReply:
    services = caller.services
    since = request.since if request.life == services.run_id else 0
    serial, states = services.store.state_locations(since)
    # It answers here, so it accepts connections.
    health = Health(services.config, services.store, services.move_queue, lambda: True)
    return DaemonReply(
        {
            "life": services.run_id,
            "serial": serial,
            "states": msgspec.to_builtins(states),
            "host_ready_bytes": services.store.pool_bytes()[1],
            "host_prefault_bytes": services.config.prefault_bytes,
            "reasons": health.reasons(),
        }
    )


ENTRIES = (
    handles(Usage, _usage, TICKETS),
    handles(Where, _where, AGENTS),
)
