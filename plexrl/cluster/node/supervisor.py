"""The supervisor of a joined node: starts its StateManager and agent, restarts them, keeps the
certificate valid, and cleans up."""

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from plexrl.cluster.config.node_options import NodeOptions, host_name
from plexrl.cluster.config.options import ClusterOptions
from plexrl.cluster.data_dir.folder import make_data_dir, try_lock
from plexrl.cluster.join.client import HeadClient, join
from plexrl.cluster.join.tokens import JoinToken
from plexrl.cluster.node.gpus import Gpus, required_gpus
from plexrl.cluster.node.membership import Kept, NodeFolder
from plexrl.cluster.node.parts import NodeConfig, NodeLinks, node_parts, with_memory
from plexrl.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    StorageError,
    UnavailableError,
)
from plexrl.process.children.part import Part
from plexrl.process.children.processes import ENDED, PartProcesses
from plexrl.process.children.restart_log import PartRecord
from plexrl.process.children.supervision import logged_to, run_until_end
from plexrl.process.folders.folders import Folders
from plexrl.process.folders.rotated_log import keep_logs_bounded
from plexrl.wire.links.address import TlsAddress, parse_address

LOG = logging.getLogger(__name__)

JOIN_S = 20.0
"""How long a machine with a token tries to reach the head."""
RETRY_S = 1.0
RETRY_S_MAX = 30.0
RENEWAL_CHECK_S_MAX = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How a machine becomes a node: the head and a token. Both are absent on a machine that comes
    back with its certificate."""

    head: TlsAddress | None = None
    token: JoinToken | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """A node that serves."""

    node: str
    head: str
    host: str
    gpus: int
    pid: int
    data_dir: str


class OwnAgent(Protocol):
    """An agent that is not a process of the node's supervisor."""

    async def start(self, part: Part) -> None:
        """Start it; returns once the scheduler has accepted the node. Raises `UnavailableError`."""
        ...

    async def ended(self) -> None:
        """Return when it has ended."""
        ...

    async def stop(self) -> None:
        """End it and its workers."""
        ...


class NodeSupervisor:
    """Owns the processes of one node."""

    def __init__(
        self,
        options: NodeOptions,
        entry: Entry,
        agent: OwnAgent | None = None,
        find_gpus: Callable[[], Gpus] | None = None,
    ) -> None:
        """A node that does not run yet.

        Args:
            options: its options.
            entry: how it joins.
            agent: runs in place of an agent's process; the node ends with it.
            find_gpus: finds the GPUs, in place of `required_gpus` of the options.
        """
        self._agent = agent
        self._find_gpus = find_gpus or partial(required_gpus, options.gpus, options.virtual_gpus)
        self._options = options
        self._gpus = Gpus(count=0, memory_bytes=0)
        self._entry = entry
        self._folders = Folders.of(options.data_dir)
        self._files = NodeFolder(self._folders.data)

    async def run(self, stop: asyncio.Event, ready: Callable[[RunningNode], None]) -> None:
        """Join if this machine has not yet, and run the node until `stop`; call `ready` once the
        scheduler has accepted it. Waits for a head that does not answer, if the machine has joined.

        Raises:
            AuthenticationError, ConflictError, InvalidRequestError, PermissionDeniedError: the head
                refuses the node.
            CapacityError: the machine has no GPU, and no number was given.
            StorageError: the data directory cannot be used.
            UnavailableError: the head does not answer the first request to join, or a part did not
                start.
        """
        self._gpus = gpus = await asyncio.to_thread(self._find_gpus)
        cluster = with_memory(self._cluster_options(), gpus)
        with ExitStack() as held:
            held.enter_context(self._locked())
            # Of a killed node, whose state is in it.
            has_host_tier = self._folders.shared_memory.exists()
            held.enter_context(self._folders.claimed())
            try:
                self._folders.make()
                held.enter_context(logged_to(self._folders.data / "logs" / "node.log"))
                self._folders.sweep()
                kept = await self._enter()
            except BaseException:
                self._folders.remove(with_host_tier=not has_host_tier)
                raise
            await self._serve(stop, ready, cluster, kept)

    async def enter(self) -> Kept:
        """Join without running the node. Raises as `run`."""
        with self._locked():
            return await self._enter()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_data_dir(self._folders.data)
        lock = try_lock(self._folders.data)
        if lock is None:
            raise ConflictError(
                f"a node or a cluster runs on {self._folders.data} already: end it, or name "
                "another data directory with --data-dir"
            )
        with lock:
            yield

    async def _enter(self) -> Kept:
        """The membership: of an earlier start, or by the token."""
        kept, token = self._files.read(), self._entry.token
        if kept is not None and (token is None or self._is_of_same(kept, token)):
            name = self._options.name
            if name and name != kept.node:
                raise InvalidRequestError(
                    f"this machine has joined as {kept.node!r}, not as {name!r}: leave out --name, "
                    "or run `plexrl node leave` first"
                )
            kept.head = str(self._entry.head or kept.head)
            kept.host = self._options.host or kept.host
            try:
                return await self._refresh(kept)
            except (AuthenticationError, PermissionDeniedError):
                if token is None:
                    raise
        return await self._join()

    async def _join(self) -> Kept:
        """Join with the token."""
        head, token = self._entry.head, self._entry.token
        if head is None or token is None:
            raise InvalidRequestError(
                "this machine has not joined a cluster: run `plexrl node token` on the head, and "
                "the command that it prints here"
            )
        node = self._options.name or host_name()
        request = await asyncio.to_thread(self._files.certificates.request)
        deadline = asyncio.get_running_loop().time() + JOIN_S
        while True:
            try:
                joined = await join(
                    head, token, node=node, request=request, host=self._options.host
                )
                break
            except UnavailableError as error:
                # A head that starts answers a little later.
                if asyncio.get_running_loop().time() > deadline:
                    raise
                LOG.info("%s", error.message)
                await asyncio.sleep(RETRY_S)
        host = self._options.host or joined.host
        kept = Kept(node=node, head=str(head), host=host, schedulers=[], routers=[])
        LOG.info("joined %s as %s", head, node)
        return self._files.take(joined.membership, kept)

    def _is_of_same(self, kept: Kept, token: JoinToken) -> bool:
        """Whether a token only repeats what this machine is already, as in the command line of a
        restarted service: it need not be spent."""
        is_cluster = self._files.certificates.fingerprint() == token.fingerprint
        return is_cluster and self._options.name in ("", kept.node)

    async def _serve(
        self,
        stop: asyncio.Event,
        ready: Callable[[RunningNode], None],
        cluster: ClusterOptions,
        kept: Kept,
    ) -> None:
        kept.pid = os.getpid()
        self._files.write(kept)
        processes = PartProcesses(
            self._folders,
            PartRecord(self._folders.parts_file),
            stuck_s=self._options.part_stuck_s,
        )
        statemanager, agent = self._parts(cluster, kept)
        renewing = asyncio.create_task(self._renew(kept))
        trimming = asyncio.create_task(keep_logs_bounded(self._folders.data / "logs"))
        try:
            await processes.start(statemanager)
            if self._agent is None:
                await self._start_agent(processes, agent)
                processes.watch((statemanager, agent))
                ending = asyncio.create_task(_when_set(stop))
            else:
                processes.watch((statemanager,))
                await self._agent.start(agent)
                ending = asyncio.create_task(_first(stop, self._agent))
            LOG.info("node %s is up: process %d", kept.node, kept.pid)
            ready(self._running(kept))
            await asyncio.wait({ending, renewing}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if renewing.done():
                renewing.result()
            LOG.info("node %s is ending", kept.node)
        finally:
            renewing.cancel()
            trimming.cancel()
            await asyncio.gather(renewing, trimming, return_exceptions=True)
            if self._agent is not None:
                await self._agent.stop()
            try:
                await processes.unwatch()
                for part in (agent, statemanager):
                    await processes.end(part)
            finally:
                self._folders.remove()
            if (now := self._files.read()) is not None:
                now.pid = 0
                try:
                    self._files.write(now)
                except (OSError, StorageError) as error:
                    LOG.warning("the end of the node is not recorded: %s", error)

    async def _refresh(self, kept: Kept) -> Kept:
        """Ask the head for the cluster's present addresses. A head that is away is met later."""
        try:
            told = await self._client(kept).renew(host=kept.host)
        except UnavailableError as error:
            LOG.warning("%s; the node starts with what it knows", error.message)
            return kept
        return self._files.take(told, kept)

    async def _start_agent(self, processes: PartProcesses, agent: Part) -> None:
        """Start the agent, which is ready once the scheduler has accepted it; wait for a scheduler
        that is away."""
        pause_s = RETRY_S
        while True:
            try:
                await processes.start(agent)
            except UnavailableError as error:
                if error.details.get("failure") == ENDED:
                    raise
                LOG.warning("%s; trying again", error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            else:
                return

    async def _renew(self, kept: Kept) -> None:
        """Renew the certificate in time, until cancelled. Processes read the new files themselves.

        Raises:
            PermissionDeniedError: the node is no member of the cluster any more.
        """
        certificates = self._files.certificates
        pause_s = RETRY_S
        while True:
            left_s = certificates.renew_in().total_seconds()
            if left_s > 0:
                await asyncio.sleep(min(left_s, RENEWAL_CHECK_S_MAX))
                continue
            try:
                request = await asyncio.to_thread(certificates.request)
                told = await self._client(kept).renew(request, host=kept.host)
                await asyncio.to_thread(self._files.take, told, kept)
            except PermissionDeniedError:
                raise
            except PlexRLError as error:
                LOG.warning("the certificate was not renewed: %s", error.message)
                # Spread, so that all nodes do not ask a head that returns at the same time.
                await asyncio.sleep(pause_s * random.SystemRandom().uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, RENEWAL_CHECK_S_MAX)
            else:
                LOG.info("the certificate was renewed")
                pause_s = RETRY_S

    def _client(self, kept: Kept) -> HeadClient:
        return HeadClient(head_of(kept), self._files.certificates.tls)

    def _parts(self, cluster: ClusterOptions, kept: Kept) -> tuple[Part, Part]:
        options = self._options
        cores = tuple(sorted(os.sched_getaffinity(0))) if options.pin_workers else ()
        cluster = replace(cluster, checkpoint_url=kept.checkpoint_url or None)
        config = NodeConfig(
            node=kept.node,
            gpus=self._gpus.count,
            node_type=options.node_type,
            speed=options.node_speed,
            block=options.block,
            cores=cores,
            gpu_uuids=self._gpus.uuids,
            gpu_kind=self._gpus.kind,
        )
        links = NodeLinks(
            scheduler=tuple(kept.schedulers),
            tls=self._files.certificates.tls,
            host=kept.host,
            ports=options.ports,
            fabric=options.fabric,
        )
        return node_parts(cluster, self._folders, config, links)

    def _cluster_options(self) -> ClusterOptions:
        """The options by which `node_parts` sizes a node."""
        options = self._options
        return ClusterOptions(
            data_dir=self._folders.data,
            gpu_memory_bytes=options.gpu_memory_bytes,
            host_memory_bytes=options.host_memory_bytes,
            nvme_bytes=options.nvme_bytes,
            part_stuck_s=options.part_stuck_s,
            settings=options.settings,
        )

    def _running(self, kept: Kept) -> RunningNode:
        return RunningNode(
            node=kept.node,
            head=kept.head,
            host=kept.host,
            gpus=self._gpus.count,
            pid=kept.pid,
            data_dir=str(self._folders.data),
        )


async def _when_set(stop: asyncio.Event) -> None:
    await stop.wait()


async def _first(stop: asyncio.Event, agent: OwnAgent) -> None:
    """Return when the node is to end, or its agent has ended."""
    tasks = {asyncio.create_task(_when_set(stop)), asyncio.create_task(agent.ended())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def head_of(kept: Kept) -> TlsAddress:
    """The address of the join service."""
    address = parse_address(kept.head)
    assert isinstance(address, TlsAddress)
    return address


def join_once(options: NodeOptions, entry: Entry) -> Kept:
    """Join without running the node. Raises as `NodeSupervisor.run`."""
    return asyncio.run(NodeSupervisor(options, entry).enter())


def run_node(options: NodeOptions, entry: Entry, ready: Callable[[RunningNode], None]) -> None:
    """Run a node until one of `ending_signals`. Raises as `NodeSupervisor.run`."""
    supervisor = NodeSupervisor(options, entry)
    run_until_end(supervisor.run, ready)
