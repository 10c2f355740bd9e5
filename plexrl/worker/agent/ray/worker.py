"""A worker as a Ray actor: the actor's process is the worker process."""

import os
import socket
import traceback
from multiprocessing.connection import Connection

from plexrl.process.children.lifeline import die_with_parent
from plexrl.worker.interface.config import WorkerConfig

EXIT_FAILED = 1


class RayWorkerActor:
    """One rank; see `plexrl.worker.agent.ray.launcher`."""

    def serve(self, config: WorkerConfig, launcher: str) -> None:
        """Run the worker. Sends this process's id to the Unix socket `launcher`, and `True` when
        requests can be served. The connection ends with the process."""
        from plexrl.worker.process.start import held_at_start, run_worker

        die_with_parent()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(launcher)
        connection = Connection(sock.detach())
        connection.send(os.getpid())
        try:
            run_worker(config, connection)
        except BaseException as error:
            held = held_at_start(error)
            if held is not None:
                connection.send(held.to_wire())
            traceback.print_exc()
        finally:
            # An actor outlives a failed call, but the worker must end.
            os._exit(EXIT_FAILED)
