"""Runs as tasks of a Ray cluster, whose machines have this package and can read the trace."""

from collections.abc import Sequence
from typing import Any

from plexrl.errors import PlexRLError
from plexrl.process.ray_connection import connect, disconnect
from plexrl.sim.engine.simulate import Progress
from plexrl.sim.search.one_run import FailedRun, OnEnd, OnProgress, Outcome, label, run_one
from plexrl.sim.workload.scenario import Scenario

LOOK_EVERY_S = 0.5
"""At how far the tasks are."""
NAMESPACE = "plexrl-simulate"


class ProgressBoard:
    """An actor that holds the latest word of each run until somebody takes it."""

    def __init__(self) -> None:
        self._latest: dict[int, Progress] = {}

    def put(self, index: int, progress: Progress) -> None:
        """A run's word."""
        self._latest[index] = progress

    def take(self) -> dict[int, Progress]:
        """What is new."""
        found, self._latest = self._latest, {}
        return found


def run_on_ray(
    scenarios: Sequence[Scenario], address: str, tell: OnProgress, ended: OnEnd
) -> tuple[Outcome, ...]:
    """As `run_all`; a task whose machine is lost is run again elsewhere.

    A process that is a driver of Ray already stays one, and its cluster is used.

    Raises:
        UnavailableError: there is no Ray, or none at `address`.
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
            done, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK_EVERY_S)
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
    def put(progress: Progress) -> None:
        board.put.remote(index, progress)

    return run_one(scenario, put)
