"""Processes of StateManagers, schedulers and routers that do not load their modules anew.

Tests start hundreds of them, and each would spend a second on imports. One server per test process
has imported them, and forks. What it forks is a child of the test process like any other, with
descriptors, environment, arguments and folder of its own.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MODULES = ("plexrl.statemanager", "plexrl.scheduler", "plexrl.router")
"""Those that `WarmProcess` can run."""
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES_MAX = 1 << 20


class WarmProcess(subprocess.Popen[Any]):
    """`python -m MODULE WORDS…`, for `MODULES`."""

    # subprocess has no other place for it: everything else of Popen stays as it is.
    def _execute_child(self, args: Any, *rest: Any) -> None:
        _executable, _preexec, _close, _pass, cwd, env, *_more = rest
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        order = {
            "words": [str(word) for word in args],
            "env": dict(os.environ if env is None else env),
            "cwd": str(Path.cwd() if cwd is None else cwd),
        }
        streams = [
            number if descriptor == -1 else descriptor
            for number, descriptor in enumerate((p2cread, c2pwrite, errwrite))
        ]
        self.pid = _server().fork(order, streams)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]  # of Popen, as above
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def start_part(
    module: str, words: Sequence[str], launcher: Sequence[str] = (), **options: Any
) -> subprocess.Popen[Any]:
    """Start `python -m module words…` with these options of `subprocess.Popen`. With `launcher`, a
    command that becomes the part's, it is started anew."""
    if launcher or module not in MODULES or sys.platform != "linux":
        return subprocess.Popen([*launcher, sys.executable, "-m", module, *words], **options)
    return WarmProcess([module, *words], **options)


class _Server:
    """The process that forks, and the connection to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
            )

    def fork(self, order: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Fork a process with these standard streams; returns its id. It is this process's child:
        for the moment this process adopts orphans of its descendants."""
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._connection, [json.dumps(order).encode()], list(streams))
                pid = int(self._connection.recv(64) or b"0")
            finally:
                _adopt_orphans(False)
        assert pid, "the server of warm processes has ended"
        return pid


@functools.cache
def _server() -> _Server:
    return _Server()


def _adopt_orphans(adopts: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each order. Returns, in a fork only, its order."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 3)
        if not message:
            sys.exit()
        ours, theirs = os.pipe()
        between = os.fork()
        if not between:
            # The fork's parent ends at once, so the test process adopts it.
            between = os.getpid()
            child = os.fork()
            if child:
                os.write(theirs, str(child).encode())
                os._exit(0)
            os.close(ours)
            os.close(theirs)
            connection.close()
            while os.getppid() == between:
                # It may ask to end with its parent, which is to be the test process.
                time.sleep(0.001)
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            for descriptor in streams:
                os.close(descriptor)
            order: dict[str, Any] = json.loads(message)
            return order
        for descriptor in (theirs, *streams):
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.send(os.read(ours, 64))
        os.close(ours)


def _main() -> NoReturn:
    for module in MODULES:
        # What is not installed for one of them is missing when that one is started.
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{module}.__main__")
    gc.freeze()
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    module, *words = order["words"]
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv = [module, *words]
    importlib.import_module(f"{module}.__main__").main()
    sys.exit()


if __name__ == "__main__":
    _main()
