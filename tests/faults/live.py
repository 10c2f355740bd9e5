"""A live cluster that can be hurt, on a simulated host with a small disk and shared memory."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.faults.controller import JOBS, STEPS
from tests.hosts.cluster import START_S, SoloCluster
from tests.hosts.jobs import Jobs
from tests.hosts.network import Network
from tests.hosts.processes import ranks

MIB = 1 << 20
DISK_BYTES = 768 * MIB
SHARED_MEMORY_BYTES = 512 * MIB
HOST_TIER_BYTES = 192 * MIB
LIMIT_S = 900.0
"""Longer than any fault and what follows from it, also on a busy machine."""
END_S = 90.0
WORKERS = 2


def wait_until(what: Callable[[], bool], message: str, limit_s: float = LIMIT_S) -> None:
    """Poll until `what` holds."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


class LiveCluster(SoloCluster):
    """A cluster on a host of its own, and the three jobs' controllers beside it."""

    data_dir = Path("/root/data")

    def __init__(self) -> None:
        self._network = Network(("solo",), SHARED_MEMORY_BYTES)
        self._network.power_on()
        (self.head,) = self._network
        self.client = self.head
        disk = ("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.data_dir))
        self.head.run("mkdir", str(self.data_dir))
        self.head.run("mount", *disk)
        self._options = {
            "virtual-gpus": "3",
            "host-memory-bytes": str(HOST_TIER_BYTES),
            "gpu-memory-bytes": str(64 * MIB),
            # Others would let each job in only after the profile of the one before, and the
            # controllers wait for each other before they train.
            "policy": "pack",
        }
        self._jobs: list[Jobs] = []

    def begin(self, **options: str) -> None:
        """Start the cluster, for the first time or again; options stay."""
        self._options |= {name.replace("_", "-"): value for name, value in options.items()}
        words = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        command = ("python", "-m", "plexrl.cluster", "--data-dir", str(self.data_dir), *words)
        self._supervisor = self.head.start(*command)
        endpoint = json.loads(self._supervisor.wait_for('"url"', START_S))
        key = self.head.path(Path(endpoint["key_file"])).read_text()
        self.environment = {"PLEXRL_URL": endpoint["url"], "PLEXRL_API_KEY": key}

    def run_jobs(self) -> None:
        """Start the three controllers; returns once all train."""
        jobs = Jobs(self, dict.fromkeys(JOBS, STEPS), workers=WORKERS)
        self._jobs.append(jobs)
        jobs.begin()

    def run_job(self, name: str) -> None:
        """Start one controller."""
        self._jobs.append(Jobs(self, {name: STEPS}, workers=WORKERS))

    def at_step(self, step: int) -> None:
        """Wait until each of the three jobs has reported so many steps."""
        jobs = self._jobs[0]

        def there() -> bool:
            jobs.check_alive()
            return min(jobs.steps().values()) >= step

        wait_until(there, f"not every job came to step {step}")

    def weights(self) -> dict[str, str]:
        """The digest of every job's final weights, once all have completed."""
        found: dict[str, str] = {}
        try:
            for jobs in self._jobs:
                found |= jobs.weights()
        except AssertionError as error:
            raise AssertionError(f"{self.logs()}\n{error}") from error
        return found

    def part(self, module: str) -> psutil.Process:
        """The process of one part, by the module it runs; one that is restarting is waited for."""
        wait_until(lambda: bool(self.head.processes(f"-m {module} ")), f"no process runs {module}")
        return self.head.processes(f"-m {module} ")[0]

    def worker(self, index: int) -> psutil.Process:
        """A worker process."""
        wait_until(lambda: bool(ranks(self.head)), "there are no workers")
        workers = ranks(self.head)
        return workers[index % len(workers)]

    def fill(self, folder: str | Path) -> Callable[[], None]:
        """Leave no free byte on a file system of the host; returns what frees it again."""
        filler = self.head.path(folder) / "filler"
        with filler.open("wb") as file:
            for chunk in (MIB, 4096):
                try:
                    while True:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), chunk)
                except OSError:
                    continue
        return filler.unlink

    def restart(self) -> None:
        """SIGTERM to the whole cluster, then start it again on the same data."""
        self._supervisor.end(timeout_s=END_S)
        self.begin()

    def logs(self) -> str:
        """The end of every part's log."""
        found = sorted((self.head.path(self.data_dir) / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in found)

    def close(self) -> None:
        """End the host with all its processes."""
        self._network.close()


def stopped_for(processes: Sequence[psutil.Process], seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long."""
    for process in processes:
        process.suspend()
    time.sleep(seconds)
    for process in processes:
        process.resume()
