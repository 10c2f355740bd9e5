"""Nodes on Ray: one actor on each Ray node runs the node's StateManager and agent.

In a cluster of several machines the actors join the head (`machine.py`). Otherwise all Ray nodes
are on the scheduler's machine, and the actors use its folders and its Unix socket.

One placement group reserves each node's GPUs, with one bundle for each GPU. Our scheduler assigns
workers to GPUs and lets several WPGs share a GPU in turns. Ray therefore counts the GPU once, by
its bundle, whatever the number of workers; it makes no decisions and only keeps other users off
these GPUs. The bundles are bound to their node by its id, so Ray never moves the group of a dead
node to another.
"""

import asyncio
import importlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.cluster.config.node_options import NodeOptions
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.config.ray_options import RayOptions
from plexrl.cluster.join.head import ClusterHead
from plexrl.cluster.join.tokens import create_token
from plexrl.cluster.node.parts import NodeConfig, options_of_nodes
from plexrl.errors import PlexRLError, UnavailableError
from plexrl.process.children.pulse import BEAT_S, Pulse
from plexrl.process.children.restart_log import PartRecord
from plexrl.process.folders.folders import Folders
from plexrl.process.memory.tuning import tune
from plexrl.process.ray_connection import GPU, RayNode, none_usable, usable_nodes

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

LOG = logging.getLogger(__name__)

LOCAL_ACTOR = ("plexrl.cluster.ray.node", "RayNodeActor")
MACHINE_ACTOR = ("plexrl.cluster.ray.machine", "RayMachineActor")
"""Modules and classes of the actors, by name: only the machines of the nodes load them."""
TOKEN_TTL_S = 600.0
"""How long the token of an actor admits its node."""
NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives every node."""
POLL_S = 1.0
"""Time between two queries for the nodes of the Ray cluster."""
PLACE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
RESTART_S = 1.0
RESTART_S_MAX = 30.0
STABLE_S = 60.0
"""After serving for this long a node's restart delay is reset."""


class RayNodes:
    """All nodes of the Ray cluster, including nodes that join later."""

    gpus = None

    def __init__(
        self,
        options: ClusterOptions,
        ray: RayOptions,
        folders: Folders,
        record: PartRecord,
        head: Callable[[], ClusterHead | None] = lambda: None,
    ) -> None:
        """`head` returns what nodes of other machines join, once it is there."""
        self._options = options
        self._head = head
        self._ray = ray
        self._folders = folders
        self._record = record
        self._kept: dict[str, asyncio.Task[None]] = {}
        """Tasks that serve the nodes, by Ray's node id."""
        self._watching: asyncio.Task[None] | None = None

    @property
    def join(self) -> bool:
        """Whether the nodes join the head: they are on several machines."""
        return self._options.network is not None

    async def start(self) -> None:
        """Serve all current nodes.

        Raises:
            CapacityError: no node can be used.
            UnavailableError: a node cannot be served.
        """
        nodes = await asyncio.to_thread(usable_nodes, self._ray.places_per_node)
        if not nodes:
            raise none_usable(self._ray.places_per_node)
        firsts = [self._keep(node) for node in nodes]
        for outcome in await asyncio.gather(*firsts, return_exceptions=True):
            if outcome is not None:
                raise outcome
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End every node's processes and return its GPUs to Ray."""
        tasks = [*self._kept.values()]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, node: RayNode) -> "asyncio.Future[None]":
        """Serve the node while it is alive; the future resolves when it serves, or fails."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept[node.node_id] = asyncio.create_task(self._serve_with_restarts(node, first))
        return first

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for node in await asyncio.to_thread(usable_nodes, self._ray.places_per_node):
                if node.node_id not in self._kept:
                    LOG.warning("node %s has joined the Ray cluster", node.node)
                    self._keep(node).add_done_callback(_retrieve)

    async def _serve_with_restarts(self, node: RayNode, first: "asyncio.Future[None]") -> None:
        from ray.exceptions import RayError

        loop = asyncio.get_running_loop()
        pause_s = RESTART_S
        while True:
            began = loop.time()
            served = _NodeActor(self._options, self._ray, self._folders, node, self._head())
            try:
                await served.start()
                if first.done():
                    self._record.restarted(node.node)
                else:
                    first.set_result(None)
                reason = await served.ended(self._record)
            except (PlexRLError, RayError) as error:
                reason = " ".join(str(error).split())
                if not first.done():
                    first.set_exception(UnavailableError(reason))
            finally:
                await served.stop()
            alive = await asyncio.to_thread(usable_nodes, self._ray.places_per_node)
            if node.node_id not in {each.node_id for each in alive}:
                LOG.warning("node %s is dead: %s", node.node, reason)
                return
            LOG.warning("node %s does not serve (%s); restarting it", node.node, reason)
            self._record.ended(node.node)
            if loop.time() - began > STABLE_S:
                pause_s = RESTART_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S_MAX)


class _NodeActor:
    """One run of a node's actor."""

    def __init__(
        self,
        options: ClusterOptions,
        ray: RayOptions,
        folders: Folders,
        node: RayNode,
        head: ClusterHead | None,
    ) -> None:
        # Passwords stay here: others may use Ray, and see the arguments of actors.
        self._options, self._network = options_of_nodes(options), options.network
        self._ray = ray
        self._head = head
        self._folders = folders
        self._node = node
        self._group: PlacementGroup | None = None
        self._actor: ActorHandle | None = None
        self._started = False

    async def start(self) -> None:
        """Reserve the GPUs and start the actor; returns once the agent has joined the scheduler.

        Raises:
            UnavailableError: the reservation or the actor failed.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = self._node
        self._group = placement_group(
            [{node.resource: 1.0}] * node.gpus,
            strategy="STRICT_PACK",
            name=f"{self._folders.run.name}-{node.node}",
            bundle_label_selector=[{NODE_ID_LABEL: node.node_id}] * node.gpus,
        )
        if not await asyncio.to_thread(self._group.wait, PLACE_TIMEOUT_S):
            raise UnavailableError(
                f"Ray did not provide {node.gpus} {node.resource}s of node {node.node} within "
                f"{PLACE_TIMEOUT_S:g} s: others use them (`ray status` shows them); end those, or "
                "start Ray nodes for PlexRL alone"
            )
        module, name = LOCAL_ACTOR if self._head is None else MACHINE_ACTOR
        actor_class = getattr(importlib.import_module(module), name)
        self._actor = (
            ray.remote(actor_class)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
                # Set before the actor's process starts; the node's processes inherit it.
                runtime_env={"env_vars": _environment()},
            )
            .remote()
        )
        arguments = self._here if self._head is None else await self._joining(self._head)
        await self._call(
            self._actor.start.remote(*arguments, self._group, node.resource), START_TIMEOUT_S
        )
        self._started = True

    @property
    def _here(self) -> tuple[Any, ...]:
        """Arguments of an actor of this machine."""
        node = self._node
        config = NodeConfig(node=node.node, gpus=node.gpus, node_type=node.node_type)
        return self._options, self._folders, config

    async def _joining(self, head: ClusterHead) -> tuple[Any, ...]:
        """Arguments of an actor of another machine: its options, and a token."""
        options, node, network = self._options, self._node, self._network
        assert network is not None
        chosen = NodeOptions(
            data_dir=Path(self._ray.node_dir) / node.node,
            name=node.node,
            gpus=node.gpus if node.resource == GPU else None,
            virtual_gpus=None if node.resource == GPU else node.gpus,
            gpu_memory_bytes=options.gpu_memory_bytes,
            host_memory_bytes=options.host_memory_bytes,
            nvme_bytes=options.nvme_bytes,
            node_type=node.node_type,
            host=node.address,
            ports=network.node_ports,
            fabric=network.fabric,
            settings=options.settings,
        )
        token, _ = await asyncio.to_thread(
            partial(create_token, head.ledger, head.authority.fingerprint, ttl_s=TOKEN_TTL_S)
        )
        return chosen, str(head.join_address), str(token)

    async def ended(self, record: PartRecord) -> str:
        """Wait until the actor has ended, or has been silent for too long; return the reason."""
        assert self._actor is not None
        serving = asyncio.create_task(self._call(self._actor.serve.remote(), None))
        watching = asyncio.create_task(self._stuck(record))
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                return watching.result()
            await serving
        except UnavailableError as error:
            return error.message
        finally:
            serving.cancel()
            watching.cancel()
            # The node may never serve again: an actor that has ended is silent no longer.
            record.answers(self._node.node)
        return "its actor returned"

    async def _stuck(self, record: PartRecord) -> str:
        """Wait until the actor, which then is not asked to stop, has been silent for too long;
        return the reason. Ray itself notices only processes that end."""
        assert self._actor is not None
        stuck_s = self._options.part_stuck_s
        pulse, was_late = Pulse(stuck_s), False
        # It has just answered `start`, so it is judged from now on.
        pulse.beat()
        beat: asyncio.Future[Any] | None = None
        while not pulse.is_stuck:
            if beat is None:
                beat = asyncio.wrap_future(self._actor.beat.remote().future())
            await asyncio.sleep(BEAT_S)
            if beat.done():
                if beat.exception() is None:
                    pulse.beat()
                beat = None
            pulse.look(asyncio.get_running_loop().time())
            if pulse.is_late != was_late:
                if pulse.is_late:
                    record.silent(self._node.node, pulse.silent_s)
                else:
                    record.answers(self._node.node)
            was_late = pulse.is_late
        self._started = False
        return f"its actor gave no sign of life for {stuck_s:g} s"

    async def stop(self) -> None:
        """End the actor and remove the reservation, gracefully if the actor still replies."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._actor is not None:
            if self._started:
                try:
                    await self._call(self._actor.stop.remote(), STOP_TIMEOUT_S)
                except UnavailableError as error:
                    LOG.info("%s", error)
            ray.kill(self._actor)
        if self._group is not None:
            await asyncio.to_thread(remove_placement_group, self._group)

    async def _call(self, answer: Any, timeout_s: float | None) -> None:
        from ray.exceptions import RayError, RayTaskError

        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(answer.future())
        except TimeoutError as error:
            raise UnavailableError(
                f"node {self._node.node} does not reply within {timeout_s:g} s"
            ) from error
        except PlexRLError as error:
            raise UnavailableError(f"node {self._node.node}: {error.message}") from error
        except RayTaskError as error:
            raise UnavailableError(f"node {self._node.node}: {error.cause!r}") from error
        except RayError as error:
            reason = " ".join(str(error).split())
            raise UnavailableError(f"node {self._node.node}: {reason}") from error


def _environment() -> dict[str, str]:
    """Environment of the actor: settings for its children, and access to all devices."""
    wanted = {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return {**tune({}), **wanted}


def _retrieve(first: "asyncio.Future[None]") -> None:
    """Mark the error of a node that joined later as retrieved: it was logged, and is retried."""
    if not first.cancelled():
        first.exception()
