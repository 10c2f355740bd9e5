"""The sandbox of a controller: many programs at a time, none of which blocks an event loop."""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from plexrl.errors import SandboxError
from plexrl.limits import check_numbers
from plexrl.process.sandbox.cgroups import usable_cgroups
from plexrl.process.sandbox.command import PROGRAM_FOLDER, sandbox_command
from plexrl.process.sandbox.limits import Limits, Program, ProgramRun
from plexrl.process.sandbox.runner import run_program
from plexrl.process.sandbox.seccomp import compile_filter
from plexrl.process.sandbox.session import Session

TRIAL_S = 60.0
NOT_EXECUTED = (126, 127)
"""Exit codes of `prlimit` when it cannot execute the command."""
CLOSED = "the sandbox is closed"
HINT = (
    "the kernel or the container runtime may forbid unprivileged user namespaces: see "
    "docs/rewards.md, section 'Where the sandbox works'"
)


class Sandbox:
    """Runs untrusted programs with bubblewrap: no network, a read-only file system, limits.

    Closing it waits for the programs that `submit` and `run_async` have started.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        at_once: int | None = None,
        folders: Sequence[str | Path] = (),
        control_groups: bool = True,
    ) -> None:
        """Runs a first program, to find out what is missing on this machine.

        Args:
            limits: of each program.
            at_once: programs that run at the same time; default: the number of this process' CPUs.
            folders: that programs may read, at the same path, such as a virtual environment.
            control_groups: use control groups where this process may make them.

        Raises:
            SandboxError: programs cannot be contained here; says what to install.
        """
        check_numbers("sandbox", {"at_once": at_once})
        self.limits = limits or Limits()
        self.at_once = at_once or len(os.sched_getaffinity(0))
        self._command = sandbox_command([Path(folder) for folder in folders])
        self._filter = compile_filter()
        self._groups = usable_cgroups() if control_groups else None
        self._slots = threading.BoundedSemaphore(self.at_once)
        self._is_closed = False
        self._threads = ThreadPoolExecutor(self.at_once, thread_name_prefix="plexrl-sandbox")
        try:
            tried = self.run(Program(command=("true",)), timeout_s=TRIAL_S)
            if tried.exit_code != 0:
                raise SandboxError(f"`true` ended with {tried}")
        except SandboxError as error:
            self.close()
            raise SandboxError(f"the sandbox does not work here: {error}; {HINT}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        groups = "limits of each process" if self._groups is None else repr(self._groups)
        return f"<Sandbox, {self.at_once} at once, {groups}>"

    @property
    def has_control_groups(self) -> bool:
        """Whether the limit of memory holds for all processes of a program together."""
        return self._groups is not None

    def run(self, program: Program, *, timeout_s: float) -> ProgramRun:
        """Run a program to its end, or for `timeout_s` seconds, in the calling thread. Waits
        before if `at_once` programs run.

        Raises:
            SandboxError: the program could not be started; nothing is known about it.
            InvalidRequestError: `timeout_s` is not a time.
        """
        check_numbers("sandbox", {"timeout_s": timeout_s})
        if self._is_closed:
            raise SandboxError(CLOSED)
        found = self._run(program, timeout_s)
        if found.exit_code in NOT_EXECUTED and not self._has(program):
            raise SandboxError(
                f"the sandbox has no program {program.command[0]!r}: install it in /usr, give its "
                "folder as one of `folders`, or give it as a file of the program"
            )
        return found

    def _has(self, program: Program) -> bool:
        """Whether the sandbox has the command. A program may end with any code by itself."""
        command = program.command[0]
        folder, _, name = command.rpartition("/")
        if folder == PROGRAM_FOLDER:
            return name in program.files
        look = Program(command=("sh", "-c", 'command -v -- "$0"', command))
        return self._run(look, TRIAL_S).exit_code == 0

    def _run(self, program: Program, timeout_s: float) -> ProgramRun:
        group = nullcontext() if self._groups is None else self._groups.group(self.limits)
        with self._slots, group as cgroup:
            return run_program(
                self._command,
                program,
                self.limits,
                timeout_s=timeout_s,
                seccomp=self._filter,
                cgroup=cgroup,
            )

    def submit(self, program: Program, *, timeout_s: float) -> Future[ProgramRun]:
        """As `run`, in a thread of the sandbox as soon as one is free."""
        try:
            return self._threads.submit(self.run, program, timeout_s=timeout_s)
        except RuntimeError as error:
            raise SandboxError(CLOSED) from error

    async def run_async(self, program: Program, *, timeout_s: float) -> ProgramRun:
        """As `run`, for `async` controllers. A cancellation does not end a program that runs."""
        return await asyncio.wrap_future(self.submit(program, timeout_s=timeout_s))

    def open_session(self, program: Program) -> Session:
        """Start a program that answers requests; it has no wall time, and takes no place of the
        `at_once` programs.

        Raises:
            SandboxError: the program could not be started.
        """
        # The kernel ends the program with the thread that started it, so that is not the caller's.
        try:
            start = self._threads.submit(
                Session, self._command, program, self.limits, self._filter, self._groups
            )
            return start.result()
        except (RuntimeError, CancelledError) as error:
            if self._is_closed:
                raise SandboxError(CLOSED) from error
            raise

    def close(self) -> None:
        """Refuse later runs, and wait for programs that `submit` and `run_async` have started.

        Those that wait for a thread are dropped. Calls of `run` go on in their own threads, and
        programs of open sessions are ended.
        """
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
