"""Executes runs as tasks of a Ray cluster whose nodes have this package and can read the trace."""

from collections.abc import Sequence
from typing import Any

from plexrl.errors import PlexRLError
from plexrl.process.ray_connection import connect, disconnect
from plexrl.sim.engine.simulate import RunProgress
from plexrl.sim.search.one_run import FailedRun, OnEnd, OnProgress, Outcome, label, run_one
from plexrl.sim.workload.scenario import Scenario

POLL_S = 0.5
"""Interval of progress reports."""
NAMESPACE = "plexrl-simulate"


class ProgressBoard:
    """A Ray actor that holds the latest progress of each run."""

    def __init__(self) -> None:
        self._latest: dict[int, RunProgress] = {}

    def put(self, index: int, progress: RunProgress) -> None:
        """Store the progress of a run."""
        self._latest[index] = progress

    def take(self) -> dict[int, RunProgress]:
        """Return and clear the progress since the last call."""
        found, self._latest = self._latest, {}
        return found


def run_on_ray(
    scenarios: Sequence[Scenario], address: str, tell: OnProgress, ended: OnEnd
) -> tuple[Outcome, ...]:
    """Like `run_all`, on Ray; a task whose node is lost runs again on another node.

    If this process is already connected to Ray, it uses that cluster and stays connected.

    Raises:
        UnavailableError: Ray is not installed, or there is no Ray cluster at `address`.
    """
    try:
        import ray
    except ImportError:
        joined = False
    else:
        joined = bool(ray.is_initialized())
    if not joined:
        connect(address, NAMESPACE)
    try:
        return _run(scenarios, tell, ended)
    finally:
        if not joined:
            disconnect()


def _run(scenarios: Sequence[Scenario], tell: OnProgress, ended: OnEnd) -> tuple[Outcome, ...]:
    import ray
    from ray.exceptions import RayError

    board = ray.remote(num_cpus=0)(ProgressBoard).remote()
    task = ray.remote(num_cpus=1)(_task)
    pending: dict[Any, int] = {
        task.remote(index, scenario, board): index for index, scenario in enumerate(scenarios)
    }
    outcomes: dict[int, Outcome] = {}
    try:
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_S)
            for index, progress in sorted(ray.get(board.take.remote()).items()):
                tell(index, progress)
            for ref in done:
                index = pending.pop(ref)
                try:
                    outcomes[index] = ray.get(ref)
                except RayError as error:
                    first = str(error).strip().partition("\n")[0]
                    lost = PlexRLError(f"{label(scenarios[index])}: its Ray task failed: {first}")
                    outcomes[index] = FailedRun(scenario=scenarios[index], error=lost)
                ended(index, outcomes[index])
    finally:
        for ref in pending:
            ray.cancel(ref, force=True)
        ray.kill(board)
    return tuple(outcomes[index] for index in range(len(scenarios)))


def _task(index: int, scenario: Scenario, board: Any) -> Outcome:
    def put(progress: RunProgress) -> None:
        board.put.remote(index, progress)

    return run_one(scenario, put)
