"""Who holds how much."""

from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from plexrl.statemanager.handlers.caller import Caller, Reply, handles
from plexrl.statemanager.protocol import Answer, Usage
from plexrl.statemanager.residency import TierName


def _usage(caller: Caller, _: Usage, __: Sequence[int]) -> Reply:
    config, store = caller.services.config, caller.services.store
    deployments: dict[str, Answer] = {}

    def entry(deployment: str) -> Answer:
        return deployments.setdefault(deployment, {"versions": [], "arena_bytes": {}})

    for version in store.find(lambda _: True):
        manifest = version.manifest
        entry(manifest.deployment)["versions"].append(
            {
                "rank": manifest.rank,
                "seq": manifest.seq,
                "kind": manifest.kind.value,
                "nbytes": manifest.nbytes,
                "world_size": manifest.world_size,
                "stamp": manifest.stamp,
                "tier": version.tier.value,
            }
        )
    for (deployment, rank), nbytes in caller.services.registry.resident_bytes().items():
        entry(deployment)["arena_bytes"][str(rank)] = nbytes
    return Reply(
        {
            "node": config.node,
            "host_bytes": store.used_bytes(TierName.HOST),
            "host_bytes_max": config.host_bytes,
            "nvme_bytes": store.used_bytes(TierName.NVME),
            "nvme_bytes_max": config.nvme_bytes,
            "device": asdict(caller.services.devices.usage(0)),
            "deployments": deployments,
            "checkpoints": msgspec.to_builtins(caller.services.checkpoints.reports()),
        }
    )


ENTRIES = (handles(Usage, _usage),)
