"""Fork servers of workers that have loaded torch already.

The agent of each cluster that a test starts has a fork server, which loads torch for five seconds.
In tests `tests/warm_site` hands its work to a fork of one process per test process, which has
loaded it. The fork is no descendant of the agent, but ends with it as a fork server does: when the
pipe to the agent closes. A test that looks for descendants takes `own_fork_servers`.
"""

import ast
import contextlib
import json
import multiprocessing
import os
import resource
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, process, util
from pathlib import Path
from typing import Any

import pytest

NAME = "PLEXRL_TEST_FORKS"
SITE = Path(__file__).parent / "warm_site"
ORDER_BYTES_MAX = 1 << 20
LIFELINE = "plexrl.worker.agent.fork_server.lifeline"


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """While the block runs, processes that are started get warm fork servers. The process that
    forks them starts when the first is asked for."""
    if sys.platform != "linux":
        yield
        return
    # It is made at its first use, and then a test may have named another folder for its files.
    util.get_temp_dir()
    name = f"plexrl-tests-{os.getpid()}-{secrets.token_hex(4)}"
    namespaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("mnt", "pid", "user")]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(128)
    end, told = os.pipe()
    with pytest.MonkeyPatch.context() as patch, listener:
        patch.setenv(NAME, " ".join([name, *namespaces]))
        patch.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)
        waiting = threading.Thread(target=_start_when_asked, args=(listener, end))
        waiting.start()
        yield
        os.close(told)
        waiting.join()
        os.close(end)


@pytest.fixture
def own_fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that are started from here on have fork servers of their own, as outside of tests."""
    monkeypatch.delenv(NAME, raising=False)


def _start_when_asked(listener: socket.socket, end: int) -> None:
    if end in select.select([listener.fileno(), end], [], [])[0]:
        return
    context = multiprocessing.get_context("forkserver")
    server = context.Process(target=_serve, args=(listener,), daemon=True)
    server.start()
    # It is no child that a test has left.
    process._children.discard(server)  # type: ignore[attr-defined]  # it has no other way
    select.select([end], [], [])
    server.terminate()
    server.join()


def _serve(listener: socket.socket) -> None:
    """Fork for each order."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, ORDER_BYTES_MAX, 5)
        if message and not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _be_fork_server(json.loads(message), descriptors, connection)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()


def _be_fork_server(
    order: dict[str, Any], descriptors: list[int], connection: socket.socket
) -> None:
    """Run what was asked for, and end with the process that asked."""
    listener, alive, *streams = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    for number, limits in order["limits"]:
        resource.setrlimit(number, tuple(limits))

    def end_together() -> None:
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=end_together, daemon=True).start()
    os.register_at_fork(after_in_child=connection.close)
    # It has the id of the process that imports it, for the forks. The agent is not its parent.
    os.environ.pop("PLEXRL_PARENT", None)
    sys.modules.pop(LIFELINE, None)
    try:
        forkserver.main(
            listener,
            alive,
            ast.literal_eval(order["preload"]),
            **ast.literal_eval(order["prepared"]),
        )
    finally:
        os._exit(0)
