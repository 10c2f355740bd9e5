"""One node of a Ray cluster: an actor that runs the node's agent and its StateManager.

`plexrl up` does the same for a virtual node. The actor owns the StateManager, its child process,
and the workers, its own actors. They all die with it.
"""

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.node.gpus import first_gpus
from plexrl.cluster.node.host_memory import default_host_bytes
from plexrl.cluster.node.parts import NodeConfig, node_parts, scheduler_address
from plexrl.errors import UnavailableError
from plexrl.process.children.part import Part
from plexrl.process.children.processes import PartProcesses
from plexrl.process.children.startup import LOG_FORMAT, parse_config
from plexrl.process.folders.folders import Folders
from plexrl.process.folders.private_folder import make_private_folder, remove_private_folder
from plexrl.process.plain_text import PlainFormatter
from plexrl.process.ray_connection import GPU
from plexrl.worker.agent.agent import Agent
from plexrl.worker.agent.ray.launcher import RayLauncher
from plexrl.worker.interface.config import AgentConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

CONNECT_TIMEOUT_S = 60.0


class RayNodeActor:
    """Runs on the node that it serves; see `plexrl.cluster.ray.nodes`."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._agent: asyncio.Task[None] | None = None
        self._processes: PartProcesses | None = None
        self._statemanager: Part | None = None
        self._leftovers: tuple[Path, ...] = ()

    async def start(
        self,
        options: ClusterOptions,
        folders: Folders,
        node: NodeConfig,
        group: "PlacementGroup",
        resource: str,
    ) -> None:
        """Start the StateManager, then the agent; returns when the scheduler has accepted the node.

        Args:
            options: those of the cluster.
            folders: the cluster's, on this machine.
            node: the node, with the GPUs that Ray counts.
            group: Ray's reservation of them.
            resource: Ray's name of what is reserved, `GPU` or `CPU`.

        Raises:
            CapacityError: Ray counts more GPUs than the machine has, or they are divided (MIG).
            UnavailableError: one of them does not start, or the scheduler cannot be reached.
        """
        _check_machine(folders)
        statemanager, agent = await asyncio.to_thread(
            parts_here, options, folders, node, has_gpus=resource == GPU
        )
        config = parse_config(json.dumps(agent.config), AgentConfig, "the node's configuration")
        run_dir = Path(config.run_dir)
        _make_folders(folders, run_dir)
        self._leftovers = (run_dir, Path(statemanager.config["host_dir"]))
        _log_to(folders.data / "logs" / f"agent-{config.node}.log")
        self._processes = PartProcesses(folders, stuck_s=options.part_stuck_s)
        self._statemanager = statemanager
        await self._processes.start(statemanager)
        self._processes.watch((statemanager,))
        connected = asyncio.Event()
        launcher = RayLauncher(group, resource, run_dir)
        self._agent = asyncio.create_task(Agent(config, launcher).run(self._stop, connected.set))
        joined = asyncio.create_task(connected.wait())
        await asyncio.wait(
            {self._agent, joined},
            timeout=CONNECT_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not joined.done():
            joined.cancel()
            raise UnavailableError(
                f"the agent of {config.node} did not join the scheduler: see the agent's log"
            )

    async def serve(self) -> None:
        """Wait until the agent has ended."""
        assert self._agent is not None
        await asyncio.wait({self._agent})

    async def beat(self) -> None:
        """Answer, which shows that the actor is not stuck."""

    async def stop(self) -> None:
        """End the workers, then the StateManager, and remove their folders."""
        self._stop.set()
        if self._agent is not None:
            await asyncio.gather(self._agent, return_exceptions=True)
        if self._processes is not None and self._statemanager is not None:
            await self._processes.unwatch()
            await self._processes.end(self._statemanager)
        for folder in self._leftovers:
            remove_private_folder(folder)


def parts_here(
    options: ClusterOptions, folders: Folders, node: NodeConfig, *, has_gpus: bool
) -> tuple[Part, Part]:
    """The node's StateManager and agent, on the GPUs of this machine.

    Args:
        options: those of the cluster.
        folders: the cluster's, on this machine.
        node: the node, with the GPUs that Ray counts.
        has_gpus: whether its workers have GPUs; if not, they share the CPUs.

    Raises:
        CapacityError: as `first_gpus`.
    """
    if has_gpus:
        gpus = first_gpus(node.gpus)
        options = replace(
            options,
            gpu_memory_bytes=options.gpu_memory_bytes or gpus.memory_bytes or None,
            host_memory_bytes=options.host_memory_bytes or default_host_bytes(gpus.uuids),
        )
        node = replace(node, gpu_uuids=gpus.uuids, gpu_kind=gpus.kind)
    return node_parts(options, folders, node)


def _check_machine(folders: Folders) -> None:
    # Not the socket: the scheduler may be starting at this moment.
    if not folders.run.is_dir():
        raise UnavailableError(
            f"the folder of the scheduler's Unix socket {scheduler_address(folders)} does not "
            "exist on this node, so the scheduler runs on another machine: let Ray's machines join "
            "it with `plexrl up --ray … --tls --host 0.0.0.0`"
        )


def _make_folders(folders: Folders, run_dir: Path) -> None:
    # The parents first: their owner could replace the folders in them.
    for folder in (folders.data, folders.run):
        make_private_folder(folder)
    remove_private_folder(run_dir)
    for folder in (run_dir, folders.shared_memory, folders.data / "logs"):
        make_private_folder(folder)


def _log_to(path: Path) -> None:
    """Send PlexRL's log to the same folder as other agents' logs; Ray keeps its own log."""
    handler = logging.FileHandler(path)
    handler.setFormatter(PlainFormatter(LOG_FORMAT))
    logger = logging.getLogger("plexrl")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
