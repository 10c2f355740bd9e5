"""The supervisor of a cluster: starts its parts, restarts those that end, and cleans up."""

import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.config.ray_options import RayOptions
from plexrl.cluster.data_dir.endpoint import NAME as ENDPOINT_FILE
from plexrl.cluster.data_dir.endpoint import Endpoint, in_use
from plexrl.cluster.data_dir.folder import make_data_dir, try_lock
from plexrl.cluster.data_dir.ports import choose_ports
from plexrl.cluster.node.gpus import Gpus, chosen_gpus
from plexrl.cluster.node.parts import (
    NodeConfig,
    head_node_links,
    node_parts,
    rollout_address,
    rollout_part,
    router_parts,
    runs_part,
    scheduler_part,
    with_memory,
)
from plexrl.errors import PlexRLError
from plexrl.process.children.part import Part
from plexrl.process.children.processes import RESTART_S_MAX, PartProcesses
from plexrl.process.children.restart_log import PartRecord
from plexrl.process.children.supervision import logged_to, run_until_end
from plexrl.process.extras import check_extras
from plexrl.process.folders.folders import Folders
from plexrl.process.folders.operator_key import operator_key, write_private
from plexrl.process.folders.rotated_log import keep_logs_bounded
from plexrl.process.plain_text import PlainFormatter
from plexrl.rollout.on_demand import first_rollout, has_rollouts

if TYPE_CHECKING:
    from plexrl.cluster.join.head import ClusterHead
    from plexrl.cluster.join.service import JoinService

LOG = logging.getLogger(__name__)

EXPOSED = (
    "the API listens on %s without TLS: everybody who can read this network's traffic can read API "
    "keys, prompts, completions and results, and use these keys. Put a proxy with TLS in front of "
    "it, or leave --host at 127.0.0.1."
)
WRITE_RETRY_S = 5.0
HeadOf = Callable[[], "ClusterHead | None"]
"""Returns what lets other machines reach this cluster, once it is there."""


class SupervisedNodes(Protocol):
    """The source of a cluster's nodes."""

    @property
    def join(self) -> bool:
        """Whether they join the head, so that they start after it."""
        ...

    @property
    def gpus(self) -> Gpus | None:
        """The GPUs of each, once they have started; None: there is no such node on this machine."""
        ...

    async def start(self) -> None:
        """Start the current nodes and keep them running.

        Raises:
            PlexRLError: a required node, or every node, cannot serve.
        """
        ...

    async def stop(self) -> None:
        """End all nodes, however far `start` got."""
        ...


class LocalNodes:
    """Nodes whose processes are on this machine."""

    join = False
    gpus: Gpus | None = None

    def __init__(
        self,
        options: ClusterOptions,
        folders: Folders,
        record: PartRecord,
        head: HeadOf = lambda: None,
    ) -> None:
        """`head` returns what lets other machines reach the nodes, once it is there."""
        self._options = options
        self._folders = folders
        self._head = head
        self._processes = PartProcesses(folders, record, stuck_s=options.part_stuck_s)
        self._parts: list[Part] = []

    async def start(self) -> None:
        if not self._options.nodes:
            return
        gpus = self.gpus = await asyncio.to_thread(self._find_gpus)
        self._options = with_memory(self._options, gpus)
        nodes = [self._node(index, gpus) for index in range(self._options.nodes)]
        self._parts += [part for node in nodes for part in node]
        await all_at_once(*(self._start_node(node) for node in nodes))
        self._processes.watch(self._parts)

    def _node(self, index: int, gpus: Gpus) -> tuple[Part, Part]:
        options, folders, head = self._options, self._folders, self._head()
        links = None if head is None else head_node_links(options, folders, head, index)
        return node_parts(options, folders, NodeConfig.local(options, index, gpus), links)

    def _find_gpus(self) -> Gpus:
        options = self._options
        # Several nodes cannot have the same GPUs.
        return chosen_gpus(0 if options.nodes > 1 else options.gpus, options.virtual_gpus)

    async def _start_node(self, parts: Iterable[Part]) -> None:
        for part in parts:
            await self._processes.start(part)

    async def stop(self) -> None:
        await self._processes.unwatch()
        for part in reversed(self._parts):
            await self._processes.end(part)


class Supervisor:
    """Owns the control-plane processes and the nodes of one cluster."""

    def __init__(
        self,
        options: ClusterOptions,
        settings: Mapping[str, Any] | None = None,
        nodes: Callable[[Folders, PartRecord, HeadOf], SupervisedNodes] | None = None,
        lock: IO[str] | None = None,
    ) -> None:
        """`settings` override the scheduler's defaults; without `nodes` they are this machine's.
        `lock` is the data directory's lock, if a script took it for an embedded cluster."""
        self._options = options
        self._settings = settings or {}
        self._folders = Folders.of(options.data_dir)
        self._record = PartRecord(self._folders.parts_file)
        self._lock = lock
        self._head: ClusterHead | None = None
        if nodes is None:
            nodes = partial(LocalNodes, options)
        self._nodes = nodes(self._folders, self._record, lambda: self._head)

    async def run(self, stop: asyncio.Event, ready: Callable[[Endpoint], None]) -> None:
        """Run the cluster until `stop`; call `ready` with its endpoint once it is up.

        Raises:
            ConflictError: a cluster runs on the same data directory.
            PermissionDeniedError: another user owns one of its folders.
            StorageError: the data directory cannot be made or written.
            UnavailableError: a part did not start; its log says why.
        """
        make_data_dir(self._folders.data)
        lock = self._lock or try_lock(self._folders.data)
        if lock is None:
            raise in_use(self._folders.data)
        with ExitStack() as held:
            held.callback(lock.close)
            held.enter_context(self._folders.claimed())
            await self._run(stop, ready, held)

    async def _run(
        self, stop: asyncio.Event, ready: Callable[[Endpoint], None], held: ExitStack
    ) -> None:
        endpoint_file = self._folders.data / ENDPOINT_FILE
        endpoint_file.unlink(missing_ok=True)
        processes = PartProcesses(self._folders, self._record, stuck_s=self._options.part_stuck_s)
        scheduler: Part | None = None
        others: list[Part] = []
        background: list[asyncio.Task[None]] = []
        service: JoinService | None = None
        try:
            self._folders.make()
            held.enter_context(logged_to(self._folders.data / "logs" / "up.log"))
            self._folders.sweep()
            background.append(asyncio.create_task(keep_logs_bounded(self._folders.data / "logs")))
            key = operator_key(self._folders.data)
            ports = choose_ports(self._options, self._folders.data)
            if self._options.network is not None:
                # With it come an HTTP client and cryptography, which a cluster of one machine does
                # not need.
                from plexrl.cluster.join.head import ClusterHead

                self._head = ClusterHead(self._options, ports)
            scheduler, *others = self._control_plane(key, ports)
            rollout = rollout_part(self._options, self._folders, ports, self._head)
            # Nodes and routers wait for the scheduler. A node's agent loads torch meanwhile, which
            # takes longest.
            starts = [processes.start(part) for part in (scheduler, *others)]
            if not self._nodes.join:
                starts.append(self._nodes.start())
            await all_at_once(*starts)
            if self._head is not None:
                service = await self._head.serve(key)
                background.append(asyncio.create_task(self._head.renew()))
            if self._nodes.join:
                await self._nodes.start()
            endpoint = self._endpoint(key, ports)
            writing = _write_with_retries(endpoint_file, endpoint.to_file())
            background.append(asyncio.create_task(writing))
            await asyncio.sleep(0)
            processes.watch((scheduler, *others))
            others.append(rollout)
            background.append(asyncio.create_task(self._serve_rollouts(processes, rollout)))
            LOG.info("the cluster is up: process %d, %s", endpoint.pid, endpoint.url)
            if self._options.is_exposed and self._head is None:
                LOG.warning(EXPOSED, self._options.host)
            ready(endpoint)
            await stop.wait()
            LOG.info("the cluster is ending: it was stopped")
        except Exception as error:
            LOG.info("the cluster is ending: %s", error)
            raise
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            # First, so that no script joins a cluster that is ending. A file that cannot be removed
            # does no harm: its process is gone then.
            with suppress(OSError):
                endpoint_file.unlink(missing_ok=True)
            try:
                if service is not None:
                    await service.close()
                await processes.unwatch()
                for part in reversed(others):
                    await processes.end(part)
                await self._nodes.stop()
                if scheduler is not None:
                    await processes.end(scheduler)
            finally:
                self._folders.remove()
            LOG.info("the cluster has ended")

    def _control_plane(self, key: str, ports: Sequence[int]) -> list[Part]:
        """The scheduler and the routers."""
        options, folders = self._options, self._folders
        digest = hashlib.sha256(key.encode()).hexdigest()
        scheduler = scheduler_part(options, folders, digest, self._settings, self._head)
        routers = router_parts(options, folders, ports, self._head)
        return [scheduler, *routers, *runs_part(options, folders, ports, self._head)]

    async def _serve_rollouts(self, processes: PartProcesses, part: Part) -> None:
        """Start the rollout service once there is a rollout, and keep it running. The cluster does
        not wait for it, nor end with it."""
        has_failed, data = False, self._folders.data
        while True:
            try:
                # Routers of other machines know its own address only.
                if not (self._options.settings.rollout.get("listen") or has_rollouts(data)):
                    await first_rollout(rollout_address(self._folders))
                await processes.start(part)
            except (PlexRLError, OSError) as error:
                LOG.error("the rollout service: %s", error)
                self._record.ended(part.name)
                has_failed = True
                await asyncio.sleep(RESTART_S_MAX)
                continue
            if has_failed:
                self._record.restarted(part.name)
            processes.watch([part])
            return

    def _endpoint(self, key: str, ports: Sequence[int]) -> Endpoint:
        head = self._head
        return Endpoint(
            self._options.url(ports),
            key,
            os.getpid(),
            str(self._folders.data),
            self._lock is not None,
            ca="" if head is None else head.api_ca,
            public_url="" if head is None else head.public_urls,
            join_address="" if head is None else str(head.join_address),
            gpus="" if self._nodes.gpus is None else str(self._nodes.gpus),
        )


def run_cluster(
    options: ClusterOptions,
    ready: Callable[[Endpoint], None],
    lifeline: Callable[[], None] | None = None,
    ray: RayOptions | None = None,
    lock: IO[str] | None = None,
) -> None:
    """Run a cluster until one of `ending_signals`, or until `lifeline` returns, which runs in a
    thread. With `ray` the nodes are those of a Ray cluster. `lock` is as for `Supervisor`.

    Raises as `Supervisor.run`, and with `ray` as `plexrl.process.ray_connection.connect`;
    UnavailableError: packages of its parts are not installed.
    """
    has_nodes = options.nodes > 0 and ray is None
    check_extras("a cluster", "server", *(["worker"] if has_nodes else []))
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    console.setFormatter(PlainFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[console])
    if ray is None:
        run_supervisor(Supervisor(options, lock=lock), ready, lifeline)
        return
    from plexrl.cluster.ray.nodes import RayNodes
    from plexrl.process.ray_connection import connect, disconnect

    # Before the event loop sets its signal handlers, because Ray sets one of its own.
    connect(ray.address, namespace=Folders.of(options.data_dir).run.name)
    try:
        supervisor = Supervisor(
            options,
            ray.scheduler_settings(),
            partial(RayNodes, options, ray),
            lock,
        )
        run_supervisor(supervisor, ready, lifeline)
    finally:
        disconnect()


def run_supervisor(
    supervisor: Supervisor,
    ready: Callable[[Endpoint], None],
    lifeline: Callable[[], None] | None,
) -> None:
    """Run it until a signal or until `lifeline` returns, also while the cluster is starting."""
    run_until_end(supervisor.run, ready, lifeline)


async def all_at_once(*works: Coroutine[Any, Any, None]) -> None:
    """Run all concurrently. After the first failure the others are cancelled, then it is
    raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            # A second cancellation would keep a task from ending what it had started.
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write_with_retries(path: Path, text: str) -> None:
    """Write a file, with retries on a full disk. The cluster runs meanwhile; only commands without
    a URL need the file."""
    while True:
        try:
            write_private(path, text)
            return
        except OSError as error:
            LOG.warning("%s cannot be written (%s); retrying", path, error)
        await asyncio.sleep(WRITE_RETRY_S)
