"""One node of a Ray cluster: an actor that runs the node's StateManager and is its agent.

What `plexrl up` does for a virtual node. The actor owns all of it: the StateManager is its child
and the workers are actors of its own, so where it dies, with its node or alone, they do.
"""

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.errors import UnavailableError
from plexrl.process.children.part import Part
from plexrl.process.children.processes import PartProcesses
from plexrl.process.folders.folders import Folders
from plexrl.process.folders.private_folder import make_private_folder, remove_private_folder
from plexrl.process.plain_text import PlainFormatter
from plexrl.process.startup import LOG_FORMAT, parse_config
from plexrl.worker.agent.agent import Agent
from plexrl.worker.agent.ray.launcher import RayLauncher
from plexrl.worker.config import AgentConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

CONNECT_TIMEOUT_S = 60.0


class RayNodeActor:
    """Lives on the node that it is of; see `plexrl.cluster.ray.nodes`."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._agent: asyncio.Task[None] | None = None
        self._processes: PartProcesses | None = None
        self._statemanager: Part | None = None
        self._leftovers: tuple[Path, ...] = ()

    async def start(
        self,
        folders: Folders,
        statemanager: Part,
        agent: dict[str, Any],
        group: "PlacementGroup",
        resource: str,
    ) -> None:
        """Start the StateManager, then the agent; returns once the scheduler knows the node.

        Raises:
            UnavailableError: one of them does not start, or the scheduler is out of reach.
        """
        config = parse_config(json.dumps(agent), AgentConfig, "the node's configuration")
        run_dir = Path(config.run_dir)
        _make_folders(config, folders, run_dir)
        self._leftovers = (run_dir, Path(statemanager.config["host_dir"]))
        _log_to(folders.data / "logs" / f"agent-{config.node}.log")
        self._processes, self._statemanager = PartProcesses(folders), statemanager
        await self._processes.start(statemanager)
        self._processes.watch((statemanager,))
        connected = asyncio.Event()
        launcher = RayLauncher(group, resource, run_dir)
        self._agent = asyncio.create_task(Agent(config, launcher).run(self._stop, connected))
        greeted = asyncio.create_task(connected.wait())
        await asyncio.wait(
            {self._agent, greeted},
            timeout=CONNECT_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not greeted.done():
            greeted.cancel()
            raise UnavailableError(f"the agent of {config.node} did not join the scheduler")

    async def serve(self) -> None:
        """Return when the agent has ended."""
        assert self._agent is not None
        await asyncio.wait({self._agent})

    async def stop(self) -> None:
        """End the workers, then the StateManager, and leave nothing of them."""
        self._stop.set()
        if self._agent is not None:
            await asyncio.gather(self._agent, return_exceptions=True)
        if self._processes is not None and self._statemanager is not None:
            await self._processes.unwatch()
            await self._processes.end(self._statemanager)
        for folder in self._leftovers:
            remove_private_folder(folder)


def _make_folders(config: AgentConfig, folders: Folders, run_dir: Path) -> None:
    if not Path(config.scheduler).is_socket():
        raise UnavailableError(
            f"{config.scheduler} is not there: this node is on another machine than the "
            "scheduler, whose Unix socket cannot be reached from here. Use the Ray nodes of one "
            "machine"
        )
    # Whoever owns the folders above could replace those below.
    for folder in (folders.data, folders.run):
        make_private_folder(folder)
    remove_private_folder(run_dir)
    for folder in (run_dir, folders.shared_memory, folders.data / "logs"):
        make_private_folder(folder)


def _log_to(path: Path) -> None:
    """Have our log where the other nodes' agents have theirs; Ray's own goes where Ray says."""
    handler = logging.FileHandler(path)
    handler.setFormatter(PlainFormatter(LOG_FORMAT))
    logger = logging.getLogger("plexrl")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
