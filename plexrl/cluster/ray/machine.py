"""One machine of a Ray cluster as a node: an actor that joins the head as `plexrl node join` does.

Through Ray the actor gets a join token that admits one node for some minutes. Key, certificate and
all other secrets are made on the machine or come from the head's join service by TLS. Nothing of
another machine's file system is used.
"""

import asyncio
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.cluster.config.node_options import NodeOptions
from plexrl.cluster.join.tokens import parse_token
from plexrl.cluster.node.gpus import first_gpus
from plexrl.cluster.node.supervisor import Entry, NodeSupervisor
from plexrl.errors import UnavailableError
from plexrl.process.children.part import Part
from plexrl.process.children.startup import parse_config
from plexrl.wire.links.address import TlsAddress, parse_address
from plexrl.worker.agent.agent import Agent
from plexrl.worker.agent.ray.launcher import RayLauncher
from plexrl.worker.interface.config import AgentConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

CONNECT_TIMEOUT_S = 60.0


class RayMachineActor:
    """Runs on the machine that it serves; see `plexrl.cluster.ray.nodes`."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def start(
        self, options: NodeOptions, head: str, token: str, group: "PlacementGroup", resource: str
    ) -> None:
        """Join the head, unless the machine has joined before, and start the StateManager and the
        agent; returns when the scheduler has accepted the node.

        Args:
            options: those of the node, with the GPUs that Ray counts.
            head: address of the join service.
            token: admits this node.
            group: Ray's reservation of the GPUs.
            resource: Ray's name of what is reserved, `GPU` or `CPU`.

        Raises:
            PlexRLError: the head refuses the node, a part does not start, or Ray counts more GPUs
                than the machine has.
        """
        address = parse_address(head)
        assert isinstance(address, TlsAddress)
        # `~` is the home directory of Ray's user on this machine.
        options = replace(options, data_dir=options.data_dir.expanduser().absolute())
        entry = Entry(head=address, token=parse_token(token))
        find = None if options.gpus is None else partial(first_gpus, options.gpus)
        supervisor = NodeSupervisor(options, entry, _AgentHere(group, resource), find)
        up = asyncio.Event()
        self._running = asyncio.create_task(supervisor.run(self._stop, lambda _: up.set()))
        waiting = asyncio.create_task(_set(up))
        await asyncio.wait({self._running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            self._running.result()

    async def serve(self) -> None:
        """Wait until the node has ended.

        Raises:
            PlexRLError: why it ended.
        """
        assert self._running is not None
        await asyncio.wait({self._running})
        self._running.result()

    async def beat(self) -> None:
        """Answer, which shows that the actor is not stuck."""

    async def stop(self) -> None:
        """End the workers, the agent and the StateManager, and remove their folders."""
        self._stop.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)


class _AgentHere:
    """The node's agent, in this actor: its workers are actors that it owns."""

    def __init__(self, group: "PlacementGroup", resource: str) -> None:
        self._group = group
        self._resource = resource
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def start(self, part: Part) -> None:
        config = parse_config(json.dumps(part.config), AgentConfig, "the node's configuration")
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
        launcher = RayLauncher(self._group, self._resource, Path(config.run_dir))
        connected = asyncio.Event()
        agent = Agent(config, launcher)
        self._running = asyncio.create_task(agent.run(self._stop, connected.set))
        joined = asyncio.create_task(_set(connected))
        await asyncio.wait(
            {self._running, joined},
            timeout=CONNECT_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        joined.cancel()
        if self._running.done():
            self._running.result()
        if not connected.is_set():
            raise UnavailableError(
                f"the scheduler has not accepted {config.node} within {CONNECT_TIMEOUT_S:g} s: see "
                f"{config.data_dir}/logs/node.log on that machine"
            )

    async def ended(self) -> None:
        assert self._running is not None
        await asyncio.wait({self._running})

    async def stop(self) -> None:
        self._stop.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)


async def _set(event: asyncio.Event) -> None:
    await event.wait()
