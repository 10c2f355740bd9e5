"""Controllers of several jobs, as processes of one host (`tests/faults/controller.py`)."""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.hosts.cluster import SoloCluster
from tests.hosts.host import HostProcess

CONTROLLER = Path(__file__).parents[1] / "faults" / "controller.py"
LIMIT_S = 1800.0
"""Time in which at least one job makes a step."""
POLL_S = 0.1


class Jobs:
    """Jobs that run at the same time on one cluster."""

    def __init__(
        self, cluster: SoloCluster, steps: Mapping[str, int], *, workers: int, pause_s: float = 0.2
    ) -> None:
        """`steps`: of each job by name; 0: until `end_at` says how many. `pause_s`: between two
        steps."""
        self._cluster = cluster
        self._processes = {
            name: cluster.client.start(
                *("python", str(CONTROLLER), name, "--workers", str(workers)),
                *("--steps", str(count), "--pause-s", str(pause_s)),
                env=cluster.environment,
            )
            for name, count in steps.items()
        }

    def begin(self) -> None:
        """Wait until all jobs have their models, then let all train."""
        self._until_all("make its models", lambda process: "ready" in process.text())
        for process in self._processes.values():
            process.send("go\n")

    def steps(self) -> dict[str, int]:
        """Steps that each job has reported."""
        return {
            name: sum(line.startswith("step ") for line in process.text().splitlines())
            for name, process in self._processes.items()
        }

    def printed(self) -> str:
        """Everything that the controllers have printed."""
        return "\n".join(process.text() for process in self._processes.values())

    def end_at(self, steps: Mapping[str, int]) -> None:
        """Say how many steps each job has."""
        for name, count in steps.items():
            self._processes[name].send(f"until {count}\n")

    def weights(self, check: Callable[[], None] | None = None) -> dict[str, str]:
        """SHA-256 of each job's final weights, once all have completed. Calls `check` often."""
        self._until_all("complete", lambda process: process.poll() == 0, check)
        found = {}
        for name, process in self._processes.items():
            path = process.wait_for("weights ").removeprefix("weights ")
            folder, _, file = path.rpartition("/")
            found[name] = hashlib.sha256(self._cluster.checkpoint(folder, file)).hexdigest()
        return found

    def check_alive(self) -> None:
        """Fail if a controller has failed; keeps the cluster's services running."""
        self._cluster.keep_running()
        for name, process in self._processes.items():
            code = process.poll()
            assert code in (None, 0), f"{name} ended with {code}: {process.text()[-4000:]}"

    def _until_all(
        self,
        do: str,
        has_done: Callable[[HostProcess], bool],
        check: Callable[[], None] | None = None,
    ) -> None:
        made, deadline = 0, time.monotonic() + LIMIT_S
        while True:
            (check or self.check_alive)()
            if (count := sum(self.steps().values())) > made:
                made, deadline = count, time.monotonic() + LIMIT_S
            late = [name for name, each in self._processes.items() if not has_done(each)]
            if not late:
                return
            assert time.monotonic() < deadline, f"{late} did not {do}; steps: {self.steps()}"
            time.sleep(POLL_S)
