"""Starts an embedded cluster, or joins the one that runs on a data directory."""

import atexit
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from plexrl.cluster.config.options import JOURNAL_VARIABLE
from plexrl.cluster.data_dir.endpoint import Endpoint, in_use, read_endpoint
from plexrl.cluster.data_dir.folder import DATA_DIR, OTHERWISE, data_dir_at, make_data_dir, try_lock
from plexrl.cluster.embedded.notices import notify_user
from plexrl.cluster.embedded.script_lock import ScriptLock
from plexrl.errors import PlexRLError, UnavailableError, from_wire
from plexrl.process.folders.leftovers import make_temporary_data
from plexrl.process.folders.operator_key import operator_key
from plexrl.process.folders.private_folder import make_private_folder

LOG = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
EMBEDDED_POLICY = "pack"
"""Jobs of an embedded cluster last minutes, and would spend most of that alone to be profiled."""
POLL_S = 0.1
"""Delay between two checks whether a cluster has started or ended."""


class EmbeddedCluster:
    """This process's share in the cluster of a data directory, which it started or joined."""

    def __init__(
        self,
        endpoint: Endpoint,
        script: ScriptLock,
        process: "subprocess.Popen[str] | None" = None,
    ) -> None:
        """`process` is the supervisor, if this process started it."""
        self._endpoint = endpoint
        self._script = script
        self._process = process
        self.url = endpoint.url
        self.api_key = endpoint.api_key
        """The operator's key."""
        self.gpus = endpoint.gpus
        """What its nodes compute on, if this process has started it."""
        self.ca = endpoint.ca
        """PEM file of the authority of the API's certificate; empty: none is needed."""
        self.data_dir = Path(endpoint.data_dir)
        atexit.register(self.leave)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._endpoint.pid

    @property
    def is_started(self) -> bool:
        """Whether this process started the cluster; its jobs are then left by former scripts."""
        return self._process is not None

    @property
    def is_embedded(self) -> bool:
        """Whether the cluster ends with the last script; that of `plexrl up` does not."""
        return self._endpoint.is_embedded

    def leave(self) -> None:
        """Stop using the cluster. An embedded cluster ends with its last script, and that script
        waits until the cluster has ended."""
        atexit.unregister(self.leave)
        if not self._script.is_own:
            return
        if not self.is_embedded:
            self._script.close()
        elif self._script.leave():
            notify_user(LOG, f"the embedded cluster has ended; {_kept_files(self.data_dir)}")

    def close(self) -> None:
        """End a cluster that this process started, even if others use it."""
        atexit.unregister(self.leave)
        if not self._script.is_own:
            return
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._script.close()


def start_embedded(data_dir: Path | None = None, **options: Any) -> EmbeddedCluster:
    """Start a cluster with the given `ClusterOptions`; without a `data_dir`, on a temporary one
    that is removed at its end. The policy is `EMBEDDED_POLICY` unless `options` name one.

    Raises:
        ConflictError: a cluster runs on `data_dir` already.
        UnavailableError: the cluster did not start, without a reason.
        PlexRLError: the reason why the cluster did not start.
    """
    if data_dir is None:
        folder, options["temporary"] = make_temporary_data(), True
    else:
        folder = make_data_dir(data_dir)
    lock = try_lock(folder)
    if lock is None:
        raise in_use(folder)
    script = ScriptLock(folder)
    try:
        with lock:
            return _start(folder, script, lock, options)
    except BaseException:
        script.close()
        raise


def join_or_start(data_dir: str | os.PathLike[str], timeout_s: float) -> EmbeddedCluster:
    """Join the cluster that runs on the data directory, embedded or of `plexrl up`; if there is
    none, start an embedded one. Waits up to `timeout_s` seconds for a cluster that starts or ends.

    Raises:
        PermissionDeniedError, StorageError: the data directory cannot be used.
        UnavailableError: a cluster holds the data directory and does not serve.
        PlexRLError: the embedded cluster did not start.
    """
    folder = make_data_dir(data_dir)
    script = ScriptLock(folder)
    try:
        return _join_or_start(folder, script, timeout_s)
    except BaseException:
        script.close()
        raise


def _join_or_start(folder: Path, script: ScriptLock, timeout_s: float) -> EmbeddedCluster:
    deadline = time.monotonic() + timeout_s
    while True:
        running = read_endpoint(folder)
        if running is not None:
            kind = "embedded cluster" if running.is_embedded else "cluster of `plexrl up`"
            notify_user(LOG, f"joined the {kind} on {folder}: {running.url}")
            return EmbeddedCluster(running, script)
        lock = try_lock(folder)
        if lock is not None:
            with lock:
                notify_user(LOG, f"starting an embedded cluster on {folder}")
                started = _start(folder, script, lock, {})
            notify_user(
                LOG,
                f"it is up at {started.url}; GPUs: {started.gpus}; `{status_command(folder)}` "
                "shows it",
            )
            return started
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"a cluster on {folder} has been starting or ending for {timeout_s:g} s: "
                f"see {folder / 'logs'}, or {OTHERWISE}"
            )
        time.sleep(POLL_S)


def status_command(data_dir: Path) -> str:
    """The shell command that shows the cluster."""
    if data_dir == data_dir_at(DATA_DIR):
        return "plexrl status"
    return f"plexrl status --data-dir {shlex.quote(str(data_dir))}"


def _start(
    folder: Path, script: ScriptLock, lock: IO[str], options: dict[str, Any]
) -> EmbeddedCluster:
    # In the environment, not an argument: the URL of a database may have a password.
    journal = options.pop("journal", None)
    environment = {name: value for name, value in os.environ.items() if name != JOURNAL_VARIABLE}
    if journal is not None:
        environment[JOURNAL_VARIABLE] = journal
    arguments = [
        word
        for name, value in {"policy": EMBEDDED_POLICY, **options, "lock": lock.fileno()}.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", _word(value))
    ]
    make_private_folder(folder / "logs")
    # A file, because a reader of this script's standard error must not wait for the cluster's end.
    with (folder / "logs" / "embedded.log").open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "plexrl.cluster", "--data-dir", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            pass_fds=(lock.fileno(),),
            # A Ctrl-C in the terminal is for the script only.
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
    reply = json.loads(line) if line else {}
    if "url" not in reply:
        process.wait()
        raise _start_error(folder, reply, is_temporary="temporary" in options)
    # The supervisor may outlive this process's use of it; the wait avoids a zombie.
    threading.Thread(target=process.wait, daemon=True).start()
    key = operator_key(Path(reply["data_dir"]))
    endpoint = Endpoint(
        reply["url"], key, reply["pid"], reply["data_dir"], True, gpus=reply["gpus"]
    )
    return EmbeddedCluster(endpoint, script, process)


def _start_error(folder: Path, reply: dict[str, Any], *, is_temporary: bool) -> PlexRLError:
    if "error" in reply:
        error = from_wire(reply["error"])
    else:
        logs = f"see {folder / 'logs'}"
        if is_temporary:
            found = sorted((folder / "logs").glob("*.log"))
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in found)
        error = UnavailableError(f"the embedded cluster did not start: {logs}")
    if is_temporary:
        shutil.rmtree(folder, ignore_errors=True)
    return error


def _kept_files(data_dir: Path) -> str:
    logs = data_dir / "logs"
    checkpoints = data_dir / "checkpoints"
    if any(checkpoints.glob("*/*/checkpoint.json")):
        return f"its checkpoints are in {checkpoints}, its logs in {logs}"
    return f"its logs are in {logs}"


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
