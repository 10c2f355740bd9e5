"""A program in the sandbox that answers one request after another, a line for a line."""

import math
import os
import select
import time
from contextlib import ExitStack

from plexrl.errors import SandboxError
from plexrl.process.sandbox.cgroups import Cgroups
from plexrl.process.sandbox.command import SandboxCommand
from plexrl.process.sandbox.limits import Limits, Program
from plexrl.process.sandbox.runner import start_program

LINE_BYTES_MAX = 1 << 16
"""Most bytes of an answer's line."""


class Session:
    """One process in the sandbox. Not for several threads at a time."""

    def __init__(
        self,
        command: SandboxCommand,
        program: Program,
        limits: Limits,
        seccomp: bytes,
        groups: Cgroups | None,
    ) -> None:
        """Starts the program.

        Raises:
            SandboxError: it could not be started.
        """
        self._pid = os.getpid()
        with ExitStack() as stack:
            group = None if groups is None else stack.enter_context(groups.group(limits))
            interactive = start_program(command, program, limits, seccomp, is_interactive=True)
            self._process = stack.enter_context(interactive)
            stack.callback(self._process.kill)
            self._process.join(group)
            self._process.go()
            os.set_blocking(self._process.stdin_fd, False)
            self._stack = stack.pop_all()

    def ask(self, request: bytes, timeout_s: float) -> bytes:
        """Send a line and return the line that answers it, both without their ends.

        Close the session after an error: a late answer would be taken for that of the next request.

        Raises:
            TimeoutError: there was no answer in `timeout_s` seconds.
            SandboxError: the program ended, or wrote something else than a line.
        """
        deadline = time.monotonic() + timeout_s
        out, err = self._process.streams
        unsent = memoryview(request + b"\n")
        while b"\n" not in out.content:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer in {timeout_s:g} s")
            poll = select.poll()
            for stream in (out, err):
                if stream.is_open:
                    poll.register(stream.descriptor, select.POLLIN)
            if unsent:
                poll.register(self._process.stdin_fd, select.POLLOUT)
            for descriptor, _ in poll.poll(math.ceil(left * 1000)):
                if descriptor == self._process.stdin_fd:
                    unsent = self._send(unsent)
                else:
                    (out if descriptor == out.descriptor else err).read()
            if not out.is_open or len(out.content) > LINE_BYTES_MAX:
                text = err.content.decode(errors="replace").strip().rpartition("\n")[2]
                raise SandboxError(f"a program in the sandbox ended: {text or 'no reason given'}")
        line, _, rest = bytes(out.content).partition(b"\n")
        out.content[:] = rest
        return line

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._process.stdin_fd, unsent) :]
        except BrokenPipeError:
            # The end of its output says the same.
            return unsent[:0]

    def close(self) -> None:
        """End the program with all of its processes; no effect in a fork, whose parent uses it."""
        if self._pid == os.getpid():
            self._stack.close()
