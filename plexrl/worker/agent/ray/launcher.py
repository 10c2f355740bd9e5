"""Launches workers as Ray actors, on the node of the launching process.

The node's placement group has a bundle for each GPU. A worker runs in the bundle of the GPU that
the scheduler assigned, and takes a small share of it, because several WPGs share a GPU in turn. So
Ray makes only that GPU visible to the worker. The launching process owns its actors; they end with
it.
"""

import os
import select
import signal
import socket
import tempfile
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.process.memory.tuning import tune
from plexrl.process.ray_connection import GPU
from plexrl.worker.agent.launcher import STOP_GRACE_S, last_line
from plexrl.worker.agent.ray.worker import RayWorkerActor
from plexrl.worker.interface.config import WorkerConfig

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

SHARE = 1 / 32
"""Share of a bundle for one worker. A group has fewer than 32 members, also while workers are being
replaced."""
START_TIMEOUT_S = 120.0
"""Timeout for Ray to start an actor's Python process."""
LOOK_S = 0.5


class RayLauncher:
    """Starts workers in the bundles of `group`, each with one `resource` (GPU or CPU)."""

    def __init__(self, group: "PlacementGroup", resource: str, run_dir: Path) -> None:
        """`run_dir` is a folder for sockets on this node."""
        self._group = group
        self._share = {"num_gpus": SHARE} if resource == GPU else {"num_cpus": SHARE}
        self._run_dir = run_dir

    def warm_up(self) -> None:
        """Start no process in advance: Ray itself keeps idle ones."""

    def start(self, config: WorkerConfig) -> "RayWorker":
        """Start a worker.

        Raises:
            OSError: Ray could not start the worker's process.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with (
            tempfile.TemporaryDirectory(prefix="l-", dir=self._run_dir) as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            path = f"{folder}/s"
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(LOOK_S)
            environment = {"OMP_NUM_THREADS": str(config.threads), "HF_HUB_OFFLINE": "1"}
            actor = (
                ray.remote(RayWorkerActor)
                .options(
                    **{"num_cpus": 0, **self._share},
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, config.gpu),
                    runtime_env={"env_vars": tune(environment)},
                )
                .remote()
            )
            serving = actor.serve.remote(config, path)
            try:
                connection = _accepted(listener, serving)
                return RayWorker(actor, serving, connection, Path(config.log_path))
            except BaseException:
                ray.kill(actor)
                raise


class RayWorker:
    """A worker in a Ray actor."""

    def __init__(
        self,
        actor: "ActorHandle",
        serving: "ObjectRef[None]",
        ready: Connection,
        log_path: Path,
    ) -> None:
        """Receives the process id from `ready`, which must not have been read before."""
        self._actor = actor
        self._serving = serving
        self._ready = ready
        self._log_path = log_path
        try:
            self.pid = int(ready.recv())
        except EOFError as error:
            raise OSError("the worker's process died at once: see its log") from error
        self._pidfd = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._pidfd)

    @property
    def sentinel(self) -> int:
        return self._pidfd

    @property
    def ready(self) -> Connection:
        return self._ready

    def exit_reason(self) -> str:
        """Ray's reason for the actor's end, and the last line of the log."""
        reason = reason_of(self._serving, STOP_GRACE_S) or "Ray reports no reason"
        return f"{reason}; its log ends with: {last_line(self._log_path)}"

    def stop(self) -> None:
        """Kill the actor through Ray, then the process itself if it still runs."""
        import ray

        ray.kill(self._actor)
        if not select.select([self._pidfd], [], [], STOP_GRACE_S)[0]:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            select.select([self._pidfd], [], [])

    def kill(self) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def reason_of(serving: "ObjectRef[None]", timeout_s: float) -> str | None:
    """Why an actor's endless call has ended, as text; None: it has not."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        ray.get(serving, timeout=timeout_s)
    except GetTimeoutError:
        return None
    except RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        relevant = [line for line in lines if line.startswith("The actor ")]
        return " ".join(relevant or lines)
    return "it returned"


def _accepted(listener: socket.socket, serving: "ObjectRef[None]") -> Connection:
    """Wait for the connection of the actor's process."""
    waited_s = 0.0
    while waited_s < START_TIMEOUT_S:
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            waited_s += LOOK_S
            reason = reason_of(serving, 0)
            if reason is not None:
                raise OSError(reason) from None
            continue
        sock.setblocking(True)
        return Connection(sock.detach())
    raise OSError(f"Ray did not start the worker in {START_TIMEOUT_S:g} s: see `ray status`")
