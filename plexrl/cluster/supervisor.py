"""`plexrl up`: starts the parts of a cluster, restarts what dies, ends all and leaves nothing."""

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any, Protocol

from plexrl.cluster.config import ClusterOptions
from plexrl.cluster.operator_key import operator_key, write_private
from plexrl.cluster.part_processes import PartProcesses
from plexrl.cluster.part_record import PartRecord
from plexrl.cluster.parts import (
    Folders,
    NodePlace,
    Part,
    check_shared_memory,
    node_parts,
    router_parts,
    scheduler_part,
)
from plexrl.cluster.ports import choose_ports
from plexrl.cluster.process import LOG_FORMAT
from plexrl.cluster.ray_options import RayOptions
from plexrl.errors import ConflictError
from plexrl.plain_text import PlainFormatter
from plexrl.private_folder import make_private_folder

LOG = logging.getLogger(__name__)

LOG_BYTES_MAX = 8 << 20
LOGS_KEPT = 3
"""Former files of the supervisor's log, each as long as the bound."""
EXPOSED = (
    "the API listens on %s without TLS: whoever sees this network's traffic can read API keys, "
    "prompts, completions and results, and act with those keys. Put a proxy that ends TLS before "
    "it, or leave --host at 127.0.0.1."
)
WRITE_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a running cluster."""

    url: str
    """Of all routers, with commas between."""
    api_key: str
    pid: int
    data_dir: str

    def to_json(self) -> str:
        return json.dumps(
            {
                "url": self.url,
                "api_key": self.api_key,
                "pid": self.pid,
                "data_dir": self.data_dir,
            }
        )


class Nodes(Protocol):
    """Where a cluster's nodes come from."""

    async def start(self) -> None:
        """Have the nodes there are join the scheduler, and from here on keep them running.

        Raises:
            PlexRLError: none, or one that must, can serve.
        """
        ...

    async def stop(self) -> None:
        """End all of them, however far `start` came."""
        ...


class LocalNodes:
    """Virtual nodes: processes of this machine."""

    def __init__(self, options: ClusterOptions, folders: Folders, record: PartRecord) -> None:
        self._options = options
        self._folders = folders
        self._processes = PartProcesses(folders, record)
        self._parts: list[Part] = []

    async def start(self) -> None:
        check_shared_memory(self._options)
        places = [NodePlace.of_virtual(self._options, at) for at in range(self._options.nodes)]
        nodes = [node_parts(self._options, self._folders, place) for place in places]
        self._parts += [part for node in nodes for part in node]
        await all_at_once(*(self._start_node(node) for node in nodes))
        self._processes.watch(self._parts)

    async def _start_node(self, parts: Iterable[Part]) -> None:
        for part in parts:
            await self._processes.start(part)

    async def stop(self) -> None:
        await self._processes.unwatch()
        for part in reversed(self._parts):
            await self._processes.end(part)


class Supervisor:
    """Owns the processes of one cluster's control plane, and its nodes."""

    def __init__(
        self,
        options: ClusterOptions,
        settings: Mapping[str, Any] | None = None,
        nodes: Callable[[Folders, PartRecord], Nodes] | None = None,
    ) -> None:
        """`settings` are the scheduler's, over the defaults; without `nodes` they are virtual."""
        self._options = options
        self._settings = settings or {}
        self._folders = Folders.of(options.data_dir)
        self._record = PartRecord(self._folders.parts_file)
        if nodes is None:
            self._nodes: Nodes = LocalNodes(options, self._folders, self._record)
        else:
            self._nodes = nodes(self._folders, self._record)

    async def run(self, stop: asyncio.Event, ready: Callable[[Endpoint], None]) -> None:
        """Run the cluster until `stop`; `ready` is told where it is.

        Raises:
            ConflictError: a cluster runs on the same data directory.
            PermissionDeniedError: another user owns one of its folders.
            UnavailableError: a part did not start; its log says why.
        """
        make_private_folder(self._folders.data)
        lock = _lock(self._folders.data)
        endpoint_file = self._folders.data / "cluster.json"
        processes = PartProcesses(self._folders, self._record)
        scheduler: Part | None = None
        routers: list[Part] = []
        log = ExitStack()
        writing: asyncio.Task[None] | None = None
        try:
            self._folders.make()
            log.enter_context(_logged_to(self._folders.data / "logs" / "up.log"))
            key = operator_key(self._folders.data)
            ports = choose_ports(self._options, self._folders.data)
            digest = hashlib.sha256(key.encode()).hexdigest()
            scheduler = scheduler_part(self._options, self._folders, digest, self._settings)
            routers = router_parts(self._options, self._folders, ports)
            # Nodes and routers look for the scheduler until it is there. A node's agent loads torch
            # meanwhile, which takes longer than all the rest.
            await all_at_once(
                processes.start(scheduler),
                self._nodes.start(),
                *(processes.start(router) for router in routers),
            )
            url = self._options.url(ports)
            endpoint = Endpoint(url, key, os.getpid(), str(self._folders.data))
            writing = asyncio.create_task(
                _write_when_there_is_room(
                    endpoint_file, json.dumps({"url": url, "pid": endpoint.pid})
                )
            )
            await asyncio.sleep(0)
            processes.watch((scheduler, *routers))
            LOG.info("the cluster is up: process %d, %s", endpoint.pid, url)
            if self._options.is_exposed:
                LOG.warning(EXPOSED, self._options.host)
            ready(endpoint)
            await stop.wait()
            LOG.info("the cluster is asked to end")
        except Exception as error:
            LOG.info("the cluster ends: %s", error)
            raise
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            await processes.unwatch()
            for router in reversed(routers):
                await processes.end(router)
            await self._nodes.stop()
            if scheduler is not None:
                await processes.end(scheduler)
            endpoint_file.unlink(missing_ok=True)
            self._folders.remove()
            LOG.info("the cluster has ended")
            log.close()
            lock.close()


def run_cluster(
    options: ClusterOptions,
    ready: Callable[[Endpoint], None],
    lifeline: int | None = None,
    ray: RayOptions | None = None,
) -> None:
    """Run a cluster until SIGINT or SIGTERM, or until the descriptor `lifeline` is at its end; with
    `ray`, on the nodes of that Ray cluster.

    Raises as `Supervisor.run`, and with `ray` as `plexrl.cluster.ray_connection.connect`.
    """
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    console.setFormatter(PlainFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[console])
    if ray is None:
        run_supervisor(Supervisor(options), ready, lifeline)
        return
    from plexrl.cluster.ray_connection import connect, disconnect
    from plexrl.cluster.ray_nodes import RayNodes

    # Before the event loop sets its signal handlers: Ray sets one of its own.
    connect(ray.address, namespace=Folders.of(options.data_dir).run.name)
    try:
        supervisor = Supervisor(
            options,
            ray.scheduler_settings(),
            lambda folders, record: RayNodes(options, ray, folders, record),
        )
        run_supervisor(supervisor, ready, lifeline)
    finally:
        disconnect()


def run_supervisor(
    supervisor: Supervisor, ready: Callable[[Endpoint], None], lifeline: int | None
) -> None:
    """Run it until a signal or the end of `lifeline`, also where the cluster is still starting."""

    async def run() -> None:
        stop, up = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell(endpoint: Endpoint) -> None:
            up.set()
            ready(endpoint)

        serving = asyncio.create_task(supervisor.run(stop, tell))

        def end() -> None:
            if not up.is_set() and not stop.is_set():
                # A start has no deadline while it makes progress, so it is not waited for.
                serving.cancel()
            stop.set()

        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, end)
        if lifeline is not None:

            def check(fd: int) -> None:
                if not os.read(fd, 1):
                    loop.remove_reader(fd)
                    end()

            loop.add_reader(lifeline, check, lifeline)
        try:
            await serving
        except asyncio.CancelledError:
            if not stop.is_set():
                raise

    asyncio.run(run())


async def all_at_once(*works: Coroutine[Any, Any, None]) -> None:
    """Carry all out together. The first that fails is raised, once the others have been
    cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            # Cancelled twice, it could not end what it had started.
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def read_endpoint(data_dir: Path) -> Endpoint | None:
    """The cluster that runs on a data directory; None where there is none."""
    path = data_dir / "cluster.json"
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        os.kill(int(body["pid"]), 0)
        return Endpoint(body["url"], operator_key(data_dir), int(body["pid"]), str(data_dir))
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Have what the supervisor does in a file of its own, which is bounded."""
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=LOGS_KEPT)
    handler.setFormatter(PlainFormatter(LOG_FORMAT))
    logger = logging.getLogger("plexrl")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


async def _write_when_there_is_room(path: Path, text: str) -> None:
    """A full disk is no reason for a cluster not to run: only commands without a URL miss the file
    until there is room."""
    while True:
        try:
            write_private(path, text)
            return
        except OSError as error:
            LOG.warning("%s cannot be written (%s); trying again", path, error)
        await asyncio.sleep(WRITE_AGAIN_S)


def _lock(data_dir: Path) -> IO[str]:
    file = (data_dir / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        running = read_endpoint(data_dir)
        who = "" if running is None else f" (process {running.pid}, {running.url})"
        raise ConflictError(
            f"a cluster runs on {data_dir} already{who}: end it or use another --data-dir"
        ) from error
    return file
