"""Launches worker processes: forks them from a server process that has torch loaded."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec

from plexrl.process.children.lifeline import PARENT, die_with_parent
from plexrl.worker.interface.config import WorkerConfig

STOP_GRACE_S = 2.0
EXIT_ORPHANED = 3
LAST_LINE_BYTES = 4096
"""Of a log so much is searched for its last line."""
PRELOAD = ["plexrl.worker.agent.fork_server.lifeline", "plexrl.worker.agent.fork_server.preload"]
"""Imported by the fork server, in this order."""


class _Paced(msgspec.Struct):
    """The fields of a deployment's specification that a launcher reads."""

    pace: str = ""


class WorkerProcess(Protocol):
    """One worker process."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        ...

    @property
    def ready(self) -> Connection:
        """Receives `None` each second while the process runs, and once `True` when the worker
        serves requests, or an error as plain values if a full file system prevented the start.
        Closed when the process ends."""
        ...

    def exit_reason(self) -> str:
        """Why the process ended, as text."""
        ...

    def stop(self) -> None:
        """End the process and wait for its end."""
        ...

    def kill(self) -> None:
        """End the process at once. Does not block; an ended process is no error."""
        ...


class Launcher(Protocol):
    """Starts workers on this node."""

    def warm_up(self) -> None:
        """Prepare, so that the next start is fast. Does not block; prepared already, it does
        nothing."""
        ...

    def start(self, config: WorkerConfig) -> WorkerProcess:
        """Start a worker. Blocks until its process exists."""
        ...


class LocalLauncher:
    """Forks workers on this machine."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` gets the fork server's socket, and is removed by its owner. Without it the
        socket is in the system's temporary directory."""
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._light = multiprocessing.get_context("spawn")
        """For paced workers, which need no torch and would have the fork server's."""

    def warm_up(self) -> None:
        """Start the fork server unless it runs. It loads torch in the background.

        Call this from the main thread: the fork server ends with the thread that started it.
        """
        os.environ[PARENT] = str(os.getpid())
        default = tempfile.tempdir
        if self._folder is not None:
            tempfile.tempdir = str(self._folder)
        try:
            # This creates a folder for the socket, which is not removed if this process is killed.
            multiprocessing.forkserver.ensure_running()
        finally:
            tempfile.tempdir = default
            del os.environ[PARENT]

    def start(self, config: WorkerConfig) -> "LocalWorker":
        """Fork a worker, or start a paced one. The first fork waits until the fork server has
        loaded torch."""
        is_paced = bool(msgspec.json.decode(config.spec_json, type=_Paced).pace)
        context = self._light if is_paced else self._context
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(config, sender), daemon=True)
        process.start()
        sender.close()
        return LocalWorker(process, receiver, Path(config.log_path))


class LocalWorker:
    """A forked worker process."""

    def __init__(
        self,
        process: multiprocessing.process.BaseProcess,
        ready: Connection,
        log_path: Path,
    ) -> None:
        self._process = process
        self._ready = ready
        self._log_path = log_path

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    @property
    def ready(self) -> Connection:
        return self._ready

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def exit_reason(self) -> str:
        """`killed by SIGKILL` or `exit code 1: <last line of the log>`."""
        self._process.join(timeout=STOP_GRACE_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}: {last_line(self._log_path)}"

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        self._process.terminate()
        self._process.join(timeout=STOP_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _main(config: WorkerConfig, ready: Connection) -> None:
    tie_to_fork_server()
    agent = multiprocessing.parent_process()
    if agent is not None and not agent.is_alive():
        # The agent died after it requested this process, so nobody needs it.
        os._exit(EXIT_ORPHANED)
    from plexrl.worker.process.start import held_at_start, run_worker

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_worker(config, ready)
    except (OSError, RuntimeError) as error:
        held = held_at_start(error)
        if held is not None:
            ready.send(held.to_wire())
        raise


def tie_to_fork_server() -> None:
    """Die with the fork server, whose process id is in the first module that it imported.

    The id is unknown if only the forks' import path contains PlexRL, so that the fork server could
    not import the module.
    """
    lifeline = sys.modules.get(PRELOAD[0])
    die_with_parent(parent=None if lifeline is None else lifeline.FORK_SERVER)


def last_line(path: Path) -> str:
    """The last line of a log that is not blank, or a text that says there is none."""
    if not path.exists():
        return "no log"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_LINE_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "an empty log"
