"""The process of a worker's pod: `python -m plexrl.cluster.kubernetes.workers.process`."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection

EXIT_ORPHANED = 3
EXIT_TERMINATED = 128 + signal.SIGTERM


def main() -> None:
    """Serve until SIGTERM, or until the agent is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="the agent's Unix socket")
    path = parser.parse_args().socket
    # A container's first process ignores signals that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))
    ready, lifeline = _connect(path), _connect(path)
    config = ready.recv()
    threading.Thread(target=_end_with, args=(ready,), daemon=True).start()
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    from plexrl.worker.process.start import held_at_start, run_worker

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_worker(config, ready)
    except (OSError, RuntimeError) as error:
        held = held_at_start(error)
        if held is not None:
            ready.send(held.to_wire())
        raise
    sys.exit(0)


def _connect(path: str) -> Connection:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    return Connection(sock.detach())


def _end_with(connection: Connection) -> None:
    """End this process when the agent closes the connection, or tells it to end."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    main()
