"""Workers as Ray actors, on the node of whoever launches them.

The node's placement group has a bundle for each of its GPUs. A worker runs in the bundle of the GPU
that the scheduler gave it and takes a small share of it, for several WPGs take turns on a GPU; so
Ray shows the worker that GPU and no other. The launching process owns its actors: they end with it.
"""

import os
import select
import signal
import socket
import tempfile
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.process.tuning import tuned
from plexrl.worker.agent.launcher import STOP_GRACE_S, last_line
from plexrl.worker.agent.ray.worker import RayWorkerActor
from plexrl.worker.config import WorkerConfig

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

SHARE = 1 / 32
"""Of a bundle, for one worker: a group has fewer members, also while workers are being replaced."""
START_TIMEOUT_S = 120.0
"""For Ray to have started an actor's process and Python in it."""
LOOK_S = 0.5


class RayLauncher:
    """Starts workers in the bundles of `group`, which hold one `resource` (GPU or CPU) each."""

    def __init__(self, group: "PlacementGroup", resource: str, run_dir: Path) -> None:
        """`run_dir` is for sockets, on this node."""
        self._group = group
        self._share = {"num_gpus": SHARE} if resource == "GPU" else {"num_cpus": SHARE}
        self._run_dir = run_dir

    def warm_up(self) -> None:
        """Nothing: Ray keeps idle processes itself."""

    def start(self, config: WorkerConfig) -> "RayWorker":
        """Start a worker.

        Raises:
            OSError: Ray could not start its process.
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
                    runtime_env={"env_vars": tuned(environment)},
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
        """`ready` has brought nothing yet; takes the process's id from it."""
        self._actor = actor
        self._serving = serving
        self._ready = ready
        self._log_path = log_path
        try:
            self.pid = int(ready.recv())
        except EOFError as error:
            raise OSError("its process died at once") from error
        self._pidfd = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._pidfd)

    @property
    def sentinel(self) -> int:
        return self._pidfd

    @property
    def ready(self) -> Connection:
        return self._ready

    def exit_reason(self) -> str:
        """What Ray says of the actor's end, and the last line of the log."""
        reason = reason_of(self._serving, STOP_GRACE_S) or "Ray does not say why"
        return f"{reason}; its log ends with: {last_line(self._log_path)}"

    def stop(self) -> None:
        """Have Ray kill the actor, and see to it that the process is gone."""
        import ray

        ray.kill(self._actor)
        if not select.select([self._pidfd], [], [], STOP_GRACE_S)[0]:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            select.select([self._pidfd], [], [])


def reason_of(serving: "ObjectRef[None]", timeout_s: float) -> str | None:
    """Why an actor's endless call has ended, in words; None: it has not."""
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
        told = [line for line in lines if line.startswith("The actor ")]
        return " ".join(told or lines)
    return "it returned"


def _accepted(listener: socket.socket, serving: "ObjectRef[None]") -> Connection:
    """The connection of the actor's process, once there is one."""
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
    raise OSError(f"Ray did not start its process in {START_TIMEOUT_S:g} s: see `ray status`")
