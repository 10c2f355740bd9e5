"""`plexrl up`: starts the parts of a cluster, restarts what dies, ends all and leaves nothing."""

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from plexrl.cluster.config import ClusterOptions
from plexrl.cluster.parts import Folders, Part, parts, write_config
from plexrl.cluster.tuning import tuned
from plexrl.errors import ConflictError, UnavailableError

LOG = logging.getLogger(__name__)

MOVES_MEMORY = ("plexrl.statemanager", "plexrl.worker")
"""Parts that copy much, or whose children do: workers pull weights themselves."""
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
RESTART_S = 0.2
RESTART_S_MAX = 5.0
STABLE_S = 10.0
"""A part that ran this long is restarted at once when it dies."""


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


class Supervisor:
    """Owns the processes of one embedded cluster."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._folders = Folders.of(options.data_dir)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = False

    async def run(self, stop: asyncio.Event, ready: Callable[[Endpoint], None]) -> None:
        """Run the cluster until `stop`; `ready` is told where it is.

        Raises:
            ConflictError: a cluster runs on the same data directory.
            UnavailableError: a part did not start; its log says why.
        """
        self._folders.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _lock(self._folders.data)
        endpoint_file = self._folders.data / "cluster.json"
        watchers: list[asyncio.Task[None]] = []
        found: list[Part] = []
        try:
            self._folders.make()
            key = _operator_key(self._folders.data)
            ports = _ports(self._options)
            digest = hashlib.sha256(key.encode()).hexdigest()
            found = parts(self._options, self._folders, digest, ports)
            for part in found:
                await self._start(part)
            url = ",".join(f"http://{self._options.host}:{port}" for port in ports)
            endpoint = Endpoint(url, key, os.getpid(), str(self._folders.data))
            _write_private(endpoint_file, endpoint.to_json())
            watchers = [asyncio.create_task(self._watch(part)) for part in found]
            ready(endpoint)
            await stop.wait()
        finally:
            self._stopping = True
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            for part in reversed(found):
                await self._end(part)
            endpoint_file.unlink(missing_ok=True)
            self._folders.remove()
            lock.close()

    async def _start(self, part: Part) -> None:
        """Start a part and wait until it says that it serves."""
        log_path = self._folders.data / "logs" / f"{part.name}.log"
        environment, options = dict(os.environ), []
        if part.module in MOVES_MEMORY:
            environment = tuned(environment)
        if part.module == "plexrl.statemanager":
            # Started by hand or by systemd it outlives whoever did that.
            options = ["--end-with-parent"]
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                part.module,
                "--config",
                str(write_config(part, self._folders)),
                *options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                # Ctrl-C is the supervisor's; it ends the parts in their order.
                start_new_session=True,
            )
        self._processes[part.name] = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if b'"ready"' not in line:
            if process.returncode is None:
                process.kill()
            raise UnavailableError(f"{part.name} did not start: see {log_path}")
        LOG.info("%s runs as process %d", part.name, process.pid)

    async def _watch(self, part: Part) -> None:
        """Start the part again whenever it ends."""
        pause_s = RESTART_S
        while True:
            began = asyncio.get_running_loop().time()
            code = await self._processes[part.name].wait()
            LOG.warning("%s ended with %s; starting it again", part.name, code)
            if asyncio.get_running_loop().time() - began > STABLE_S:
                pause_s = RESTART_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S_MAX)
            try:
                await self._start(part)
            except UnavailableError as error:
                LOG.error("%s", error)

    async def _end(self, part: Part) -> None:
        process = self._processes.get(part.name)
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            LOG.error("%s did not end in %g s; killed", part.name, STOP_TIMEOUT_S)
            process.kill()
            await process.wait()


def run_cluster(
    options: ClusterOptions, ready: Callable[[Endpoint], None], lifeline: int | None = None
) -> None:
    """Run a cluster until SIGINT or SIGTERM, or until the descriptor `lifeline` is at its end.

    Raises as `Supervisor.run`.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, stop.set)
        if lifeline is not None:

            def check(fd: int) -> None:
                if not os.read(fd, 1):
                    loop.remove_reader(fd)
                    stop.set()

            loop.add_reader(lifeline, check, lifeline)
        await Supervisor(options).run(stop, ready)

    asyncio.run(run())


def read_endpoint(data_dir: Path) -> Endpoint | None:
    """The cluster that runs on a data directory; None where there is none."""
    path = data_dir / "cluster.json"
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        os.kill(int(body["pid"]), 0)
        return Endpoint(body["url"], body["api_key"], int(body["pid"]), body["data_dir"])
    except (OSError, ValueError, KeyError):
        return None


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


def _operator_key(data_dir: Path) -> str:
    """The operator's key, made at the first start and kept."""
    path = data_dir / "operator.key"
    if path.exists():
        return path.read_text().strip()
    key = f"plx-{secrets.token_urlsafe(24)}"
    _write_private(path, key)
    return key


def _write_private(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(text)
    part.rename(path)


def _ports(options: ClusterOptions) -> list[int]:
    """The routers'; fixed from here on, so that a restarted one has the same."""
    if options.port:
        return [options.port + index for index in range(options.routers)]
    with ExitStack() as probes:
        found = []
        for _ in range(options.routers):
            probe = probes.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((options.host, 0))
            found.append(int(probe.getsockname()[1]))
        return found
