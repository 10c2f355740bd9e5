"""The process of a node's pod, with a real StateManager and a real agent, without Kubernetes."""

import asyncio
from pathlib import Path

from plexrl.cluster.kubernetes.node import run_node
from plexrl.process.folders.rotated_log import OUTPUT_BYTES_MAX

END_S = 60.0
GIB = 1 << 30


def test_the_logs_of_a_pods_workers_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "data" / "logs" / "node-1" / "job" / "actor-0.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.truncate(OUTPUT_BYTES_MAX // 2)
    statemanager = {
        "node": "node-1",
        "listen": str(tmp_path / "s"),
        "host_dir": str(tmp_path / "host"),
        "host_bytes": 64 << 20,
        "nvme_dir": str(tmp_path / "nvme"),
        "nvme_bytes": GIB,
    }
    agent = {
        "node": "node-1",
        "scheduler": [f"unix:{tmp_path}/absent"],
        "statemanager": str(tmp_path / "s"),
        "gpus": 1,
        "ticket_key_file": str(tmp_path / "ticket.key"),
        "gpu_memory_bytes": GIB,
        "host_memory_bytes": 64 << 20,
        "run_dir": str(tmp_path / "run"),
        "rendezvous_dir": str(tmp_path),
        "data_dir": str(tmp_path / "data"),
    }
    (tmp_path / "ticket.key").write_bytes(bytes(32))

    async def run() -> int:
        stop = asyncio.Event()
        running = asyncio.create_task(
            run_node({"statemanager": statemanager, "agent": agent}, stop)
        )
        try:
            async with asyncio.timeout(END_S):
                while log.stat().st_size:
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.01)
        finally:
            stop.set()
            status = await running
        return status

    assert asyncio.run(run()) == 0
    assert log.with_name("actor-0.log.1").stat().st_size == OUTPUT_BYTES_MAX // 2
