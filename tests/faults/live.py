"""A live cluster that can be hurt: its own mounts, its own small disk and shared memory."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.faults.controller import JOBS

MIB = 1 << 20
DISK_BYTES = 768 * MIB
SHARED_MEMORY_BYTES = 512 * MIB
HOST_TIER_BYTES = 192 * MIB
LIMIT_S = 900.0
"""Longer than any fault and what follows from it, also on a busy machine."""


def wait_until(what: Callable[[], bool], message: str, limit_s: float = LIMIT_S) -> None:
    """Poll until `what` holds."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


class Host:
    """A private mount namespace: `/dev/shm` and the data directory are small file systems."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True)
        self.data_dir = data_dir
        mounts = (
            f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {data_dir} && "
            f"mount -t tmpfs -o size={SHARED_MEMORY_BYTES} tmpfs /dev/shm && "
            "echo mounted && exec sleep infinity"
        )
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts],
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n", "no private mounts: are we root?"

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--", *words]

    def path(self, inside: str | Path) -> Path:
        """A path of this host, as a path of ours."""
        return Path(f"/proc/{self._holder.pid}/root{inside}")

    def fill(self, folder: str | Path) -> Callable[[], None]:
        """Leave no free byte on a file system; returns what frees it again."""
        filler = self.path(folder) / "filler"
        with filler.open("wb") as file:
            for chunk in (MIB, 4096):
                try:
                    while True:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), chunk)
                except OSError:
                    continue
        return filler.unlink

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()


@dataclass(slots=True)
class Running:
    """A controller's process and what it has printed."""

    name: str
    process: "subprocess.Popen[str]"
    stderr: Path
    lines: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps it has reported."""
        return sum(line.startswith("step ") for line in self.lines)

    def read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line.strip())

    def weights(self) -> str:
        """Where its last checkpoint lies; fails where the job did not complete."""
        code = self.process.wait(LIMIT_S)
        assert code == 0, f"{self.name} ended with {code}: {self.stderr.read_text()[-3000:]}"
        found = [line for line in self.lines if line.startswith("weights ")]
        assert found, f"{self.name} saved no weights: {self.lines}"
        return found[0].removeprefix("weights ")


class LiveCluster:
    """A cluster on a host of its own, and the three jobs' controllers beside it."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.host = Host(folder / "data")
        self._folder = folder
        self._options = {
            "gpus-per-node": "3",
            "host-memory-bytes": str(HOST_TIER_BYTES),
            "gpu-memory-bytes": str(64 * MIB),
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        self._controllers: list[Running] = []
        self._readers: list[threading.Thread] = []
        self._start()

    def _start(self) -> None:
        words = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        data = str(self.host.data_dir)
        self._supervisor = subprocess.Popen(
            self.host.command(sys.executable, "-m", "plexrl.cluster", "--data-dir", data, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        assert line, f"the cluster did not start: {self.logs()}"
        endpoint = json.loads(line)
        self.url: str = endpoint["url"]
        self.api_key: str = endpoint["api_key"]

    def run_jobs(self) -> None:
        """Start the three controllers; returns once all train."""
        for name in JOBS:
            self.run_job(name)
        self._until_all("make its models", lambda each: "ready" in each.lines)
        for each in self._controllers:
            assert each.process.stdin is not None
            each.process.stdin.write("go\n")
            each.process.stdin.flush()

    def run_job(self, name: str) -> None:
        """Start one controller."""
        controller = Path(__file__).with_name("controller.py")
        stderr = self._folder / f"{name}.stderr"
        with stderr.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, str(controller), name],
                env={**os.environ, "PLEXRL_URL": self.url, "PLEXRL_API_KEY": self.api_key},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert process.stdout is not None
        running = Running(name, process, stderr)
        self._controllers.append(running)
        reader = threading.Thread(target=running.read, args=(process.stdout,))
        reader.start()
        self._readers.append(reader)

    def at_step(self, step: int) -> None:
        """Wait until every job has reported so many steps."""
        self._until_all(f"come to step {step}", lambda each: each.steps >= step)

    def _until_all(self, do: str, has_done: Callable[[Running], bool]) -> None:
        def there() -> bool:
            return all(map(has_done, self._controllers)) or bool(self._failed())

        wait_until(there, f"not every job did {do}: {self.logs()}")
        assert not self._failed(), f"{self._failed()} ended before the fault: {self.logs()}"

    def _failed(self) -> list[str]:
        return [each.name for each in self._controllers if each.process.poll() not in (None, 0)]

    def weights(self) -> dict[str, str]:
        """The digest of every job's final weights, once all have completed."""
        found = {}
        try:
            for each in self._controllers:
                path = self.host.path(each.weights())
                found[each.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        except AssertionError as error:
            raise AssertionError(f"{self.logs()}\n{error}") from error
        return found

    def part(self, module: str) -> psutil.Process:
        """The process of one part, by the module it runs; one that is restarting is waited for."""
        found: list[psutil.Process] = []

        def look() -> bool:
            for process in psutil.Process(self._supervisor.pid).children():
                try:
                    if f"-m {module} " in " ".join(process.cmdline()):
                        found.append(process)
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
            return bool(found)

        wait_until(look, f"no process runs {module}")
        return found[0]

    def worker(self, index: int) -> psutil.Process:
        """A worker process: one of the agent's descendants that serves a rank's socket."""
        workers: list[psutil.Process] = []

        def look() -> bool:
            workers.clear()
            for process in self.part("plexrl.worker").children(recursive=True):
                try:
                    sockets = process.net_connections(kind="unix")
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                if any(each.laddr and str(each.laddr).endswith(".sock") for each in sockets):
                    workers.append(process)
            return bool(workers)

        wait_until(look, "there are no workers")
        return sorted(workers, key=lambda each: each.pid)[index % len(workers)]

    def restart(self) -> None:
        """SIGTERM to the whole cluster, then start it again on the same data."""
        self._end()
        self._start()

    def logs(self) -> str:
        """The end of every part's log."""
        found = sorted((self.host.path(self.host.data_dir) / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{_tail(path)}" for path in found)

    def _end(self) -> None:
        if self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGTERM)
            try:
                self._supervisor.wait(90)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        for each in self._controllers:
            each.process.kill()
            each.process.wait()
        for reader in self._readers:
            reader.join()
        for each in self._controllers:
            for pipe in (each.process.stdin, each.process.stdout):
                if pipe is not None:
                    pipe.close()
        self._end()
        self.host.close()


def stopped_for(processes: Sequence[psutil.Process], seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long."""
    for process in processes:
        process.suspend()
    time.sleep(seconds)
    for process in processes:
        process.resume()


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:]
