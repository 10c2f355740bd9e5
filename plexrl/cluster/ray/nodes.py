"""The nodes of a Ray cluster as ours: one actor on each, which runs its StateManager and agent.

Each node's GPUs are reserved by one placement group with a bundle a GPU. The scheduler decides
which GPU a worker gets, and lets several WPGs take turns on it; so what Ray counts as taken is the
GPU, by the bundle, once, however many workers share it. Ray decides nothing, and keeps other users
of the cluster off what is ours. The bundles are bound to their node by its id: a group whose node
has died is never placed on another.
"""

import asyncio
import importlib
import logging
from typing import TYPE_CHECKING, Any

from plexrl.cluster.config import ClusterOptions
from plexrl.cluster.parts import NodePlace, node_parts
from plexrl.cluster.ray.options import RayOptions
from plexrl.errors import PlexRLError, UnavailableError
from plexrl.process.children.restart_log import PartRecord
from plexrl.process.folders.folders import Folders
from plexrl.process.ray_connection import RayNode, none_usable, usable_nodes
from plexrl.process.tuning import tuned

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

LOG = logging.getLogger(__name__)

NODE_ACTOR = ("plexrl.worker.agent.ray.node", "RayNodeActor")
"""Module and class. By name, for it belongs to another room: it runs in processes of its own."""
NODE_ID_LABEL = "ray.io/node-id"
"""Which Ray gives every node."""
LOOK_S = 1.0
"""Between two looks at which nodes there are."""
PLACE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
AGAIN_S = 1.0
AGAIN_S_MAX = 30.0
STABLE_S = 60.0
"""A node that served this long is served again soon when its actor dies."""


class RayNodes:
    """All nodes of the Ray cluster, those that come later too."""

    def __init__(
        self, options: ClusterOptions, ray: RayOptions, folders: Folders, record: PartRecord
    ) -> None:
        self._options = options
        self._ray = ray
        self._folders = folders
        self._record = record
        self._kept: dict[str, asyncio.Task[None]] = {}
        """By Ray's node id."""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve all nodes there are.

        Raises:
            CapacityError: none can be used.
            UnavailableError: one cannot be served.
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
        """End every node's processes, and give its GPUs back to Ray."""
        tasks = [*self._kept.values()]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, node: RayNode) -> "asyncio.Future[None]":
        """Serve the node as long as it lives; the future says that it serves, or why it cannot."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept[node.node_id] = asyncio.create_task(self._serve_again_and_again(node, first))
        return first

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for node in await asyncio.to_thread(usable_nodes, self._ray.places_per_node):
                if node.node_id not in self._kept:
                    LOG.warning("node %s has joined the Ray cluster", node.node)
                    self._keep(node).add_done_callback(_retrieve)

    async def _serve_again_and_again(self, node: RayNode, first: "asyncio.Future[None]") -> None:
        from ray.exceptions import RayError

        loop = asyncio.get_running_loop()
        pause_s = AGAIN_S
        while True:
            began = loop.time()
            served = _Served(self._options, self._folders, node)
            try:
                await served.start()
                if first.done():
                    self._record.restarted(node.node)
                else:
                    first.set_result(None)
                reason = await served.ended()
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
            LOG.warning("node %s does not serve (%s); starting it again", node.node, reason)
            self._record.ended(node.node)
            if loop.time() - began > STABLE_S:
                pause_s = AGAIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S_MAX)


class _Served:
    """One life of a node's actor."""

    def __init__(self, options: ClusterOptions, folders: Folders, node: RayNode) -> None:
        self._options = options
        self._folders = folders
        self._node = node
        self._group: PlacementGroup | None = None
        self._actor: ActorHandle | None = None
        self._started = False

    async def start(self) -> None:
        """Reserve the GPUs and start the actor; returns once the agent has joined the scheduler.

        Raises:
            UnavailableError: something of it failed.
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
                f"Ray did not give {node.gpus} {node.resource}s of node {node.node} in "
                f"{PLACE_TIMEOUT_S:g} s: others use them (`ray status` shows them); end those, or "
                "start Ray nodes for PlexRL alone"
            )
        module, name = NODE_ACTOR
        actor_class = getattr(importlib.import_module(module), name)
        self._actor = (
            ray.remote(actor_class)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
                # Read before a process's first line; the node's processes inherit them.
                runtime_env={"env_vars": _environment()},
            )
            .remote()
        )
        place = NodePlace(node=node.node, gpus=node.gpus, node_type=node.node_type)
        statemanager, agent = node_parts(self._options, self._folders, place)
        await self._call(
            self._actor.start.remote(
                self._folders, statemanager, agent.config, self._group, node.resource
            ),
            START_TIMEOUT_S,
        )
        self._started = True

    async def ended(self) -> str:
        """Wait until the actor has ended; returns why it did."""
        assert self._actor is not None
        try:
            await self._call(self._actor.serve.remote(), None)
        except UnavailableError as error:
            return error.message
        return "its actor returned"

    async def stop(self) -> None:
        """End what there is of it, in order where it still answers."""
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
                f"node {self._node.node} does not answer in {timeout_s:g} s"
            ) from error
        except PlexRLError as error:
            raise UnavailableError(f"node {self._node.node}: {error.message}") from error
        except RayTaskError as error:
            raise UnavailableError(f"node {self._node.node}: {error.cause!r}") from error
        except RayError as error:
            reason = " ".join(str(error).split())
            raise UnavailableError(f"node {self._node.node}: {reason}") from error


def _environment() -> dict[str, str]:
    """Of the actor: what its children need, and sight of all of the node's devices."""
    wanted = {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return {**tuned({}), **wanted}


def _retrieve(first: "asyncio.Future[None]") -> None:
    """A node that came later failed to start: it is tried again, and was logged."""
    if not first.cancelled():
        first.exception()
