"""What the ranks of a tensor-parallel engine run, each in a process of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.model.parallelism import Parallelism
from plexrl.statemanager.config import StateManagerConfig
from plexrl.wire.operations import OperationKind
from plexrl.worker.state.device import open_device
from tests.statemanager.device.test_emulated_workers import Rank
from tests.worker.rollout.engine.engine_ranks import follow


def run(
    rank: int, uuids: tuple[str, ...], node: StateManagerConfig, folder: str, spec_json: str
) -> None:
    """Generate, be offloaded, be loaded and generate; the leader leaves `drawn.npy`. A rank with an
    empty UUID is on the CPU. `spec_json`: the deployment of one rank."""
    device = open_device(uuids[rank])
    count = len(uuids)
    store = dist.FileStore(f"{folder}/store", count)  # type: ignore[attr-defined]
    dist.init_process_group(device.collectives, store=store, rank=rank, world_size=count)
    layout = Parallelism(tp=count)
    spec = replace(deployment_spec_from_json(spec_json), workers=count, parallelism=layout)
    made = Rank(spec, node, device, rank)
    backend: Any = made.backend
    drawn = []
    for _ in range(2):
        made.move(OperationKind.LOAD, 0)
        if rank:
            follow(backend.engine, backend.ranks, lambda: None)
        else:
            drawn += [made.generate() for _ in range(3)]
            backend.calls.send("close")
        made.move(OperationKind.OFFLOAD, 0)
        dist.barrier()
    if rank == 0:
        np.save(Path(folder) / "drawn.npy", np.array(drawn))
    made.close()
    dist.destroy_process_group()
