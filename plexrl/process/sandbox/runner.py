"""One run: start it under its limits, read its output, end all of its processes.

The steps: bubblewrap makes the namespaces and waits. The process that is number 1 in them joins the
control group. bubblewrap starts a shell, which ends if the controller was killed. The shell starts
the program by way of `prlimit`, which sets the other limits. In every case we kill number 1, by its
descriptor; with it the kernel ends all processes in there.
"""

import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl

from plexrl.errors import SandboxError
from plexrl.process.sandbox.cgroups import Cgroup
from plexrl.process.sandbox.command import START_MARK, SandboxCommand
from plexrl.process.sandbox.limits import Ending, Limits, Program, ProgramRun

START_S = 60.0
"""How long bubblewrap may take; a machine under heavy load takes seconds."""
CHUNK_BYTES = 1 << 16
SEALS = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL
SIGNAL_LIMITS = {128 + signal.SIGXCPU: "cpu", 128 + signal.SIGXFSZ: "file_size"}


def run_program(
    command: SandboxCommand,
    program: Program,
    limits: Limits,
    *,
    timeout_s: float,
    seccomp: bytes,
    cgroup: Cgroup | None,
) -> ProgramRun:
    """Run a program to its end, or for `timeout_s` seconds; blocks the calling thread.

    Raises:
        SandboxError: the program could not be started.
    """
    with ExitStack() as stack:
        child = stack.enter_context(start_program(command, program, limits, seccomp))
        try:
            child.join(cgroup)
            began = time.monotonic()
            child.go()
            ended_by = _watch(child, began + timeout_s)
            wall_s = time.monotonic() - began
        finally:
            child.kill()
        for stream in child.streams:
            stream.drain()
        if cgroup is not None and cgroup.is_out_of_memory():
            ended_by = "memory"
        return _result(child, ended_by, wall_s)


@dataclass(slots=True)
class OutputStream:
    """One output of the program; keeps the first `size` bytes."""

    descriptor: int
    size: int
    content: bytearray = field(default_factory=bytearray)
    is_open: bool = True
    is_over: bool = False
    unread_mark: bytes = b""
    """It is removed where it comes first."""

    def read(self) -> None:
        """Take what is there; the descriptor must be ready."""
        found = os.read(self.descriptor, CHUNK_BYTES)
        self.is_open = bool(found)
        if self.unread_mark and self.unread_mark in found:
            found, self.unread_mark = found.replace(self.unread_mark, b"", 1), b""
        self.is_over = self.is_over or len(self.content) + len(found) > self.size
        self.content += found[: self.size - len(self.content)]

    def drain(self) -> None:
        """Take the rest; all writers are gone."""
        while self.is_open:
            self.read()


@dataclass(slots=True)
class SandboxProcess:
    """bubblewrap and the program that it runs."""

    process: subprocess.Popen[bytes]
    init: int
    """Number of the process that is number 1 in the sandbox."""
    init_fd: int
    """Its descriptor: it names this process even when the number is given to another one."""
    status_fd: int
    go_fd: int
    stdin_fd: int
    """-1 if the program is not interactive."""
    streams: tuple[OutputStream, OutputStream]
    status: bytearray = field(default_factory=bytearray)

    def join(self, cgroup: Cgroup | None) -> None:
        """Put the sandbox into its control group."""
        if cgroup is None:
            return
        try:
            cgroup.add(self.init)
        except OSError as error:
            # bubblewrap has ended, and says why; or the group has.
            self.kill()
            self.streams[1].drain()
            raise not_started(self.streams[1], str(error)) from error

    def go(self) -> None:
        """Let bubblewrap start the program."""
        with suppress(BrokenPipeError):
            os.write(self.go_fd, b"1")

    def kill(self) -> None:
        """End all processes of the sandbox, and wait until they have ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)
        poll = select.poll()
        poll.register(self.init_fd, select.POLLIN)
        poll.poll()
        self.process.wait()
        # bubblewrap leaves it to process 1 of the machine or container. That may be this process.
        with suppress(ChildProcessError):
            os.waitpid(self.init, os.WNOHANG)

    def exit_code(self) -> int | None:
        """The exit code that bubblewrap reported, after its end; None if it reported none."""
        while found := os.read(self.status_fd, CHUNK_BYTES):
            self.status += found
        reports = [json.loads(line) for line in self.status.splitlines()]
        return next((int(report["exit-code"]) for report in reports if "exit-code" in report), None)


@contextmanager
def start_program(
    command: SandboxCommand,
    program: Program,
    limits: Limits,
    seccomp: bytes,
    *,
    is_interactive: bool = False,
) -> Iterator[SandboxProcess]:
    """bubblewrap, waiting to start the program. The standard input of an interactive program is a
    pipe, `stdin_fd`, instead of the program's content."""
    with ExitStack() as stack:
        try:
            with ExitStack() as given:
                files = [(name, _memory_file(given, data)) for name, data in program.files.items()]
                rules = _memory_file(given, seccomp)
                stdin_fd, stdin = -1, -1
                if is_interactive:
                    stdin_fd, stdin = _pipe(stack, given, is_reversed=True)
                else:
                    stdin = _memory_file(given, program.stdin)
                status_read, status_write = _pipe(stack, given)
                go_write, go_read = _pipe(stack, given, is_reversed=True)
                options = command.arguments(
                    limits, files, seccomp=rules, status=status_write, go=go_read
                )
                process = subprocess.Popen(
                    [*options, *program.command],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # The sandbox can read the environment that its first process began with.
                    env={},
                    cwd="/",
                    pass_fds=[*(each for _, each in files), rules, status_write, go_read],
                    start_new_session=True,
                )
                stack.callback(_reap, process)
        except OSError as error:
            raise SandboxError(f"the sandbox could not start the program: {error}") from error
        assert process.stdout is not None
        assert process.stderr is not None
        out = OutputStream(process.stdout.fileno(), limits.output_bytes)
        err = OutputStream(process.stderr.fileno(), limits.output_bytes, unread_mark=START_MARK)
        status = bytearray()
        init = _init_process(status_read, status, err)
        try:
            init_fd = os.pidfd_open(init)
        except ProcessLookupError as error:
            # bubblewrap has ended, and says why.
            process.wait()
            err.drain()
            raise not_started(err, str(error)) from error
        stack.callback(os.close, init_fd)
        streams = (out, err)
        yield SandboxProcess(
            process, init, init_fd, status_read, go_write, stdin_fd, streams, status
        )


def _init_process(status_fd: int, status: bytearray, err: OutputStream) -> int:
    """Number of the sandbox's first process, as soon as bubblewrap has made it."""
    poll = select.poll()
    poll.register(status_fd, select.POLLIN)
    deadline = time.monotonic() + START_S
    while b"\n" not in status:
        left = deadline - time.monotonic()
        found = b""
        if left > 0 and poll.poll(math.ceil(left * 1000)):
            found = os.read(status_fd, CHUNK_BYTES)
        if not found:
            poll.register(err.descriptor, select.POLLIN)
            if poll.poll(0):
                err.read()
            raise not_started(err, f"no answer from bubblewrap in {START_S:g} s")
        status += found
    return int(json.loads(status.splitlines()[0])["child-pid"])


def not_started(err: OutputStream, otherwise: str) -> SandboxError:
    """The error with bubblewrap's own words, if there are any."""
    text = err.content.decode(errors="replace").strip()
    return SandboxError(f"the sandbox could not start the program: {text or otherwise}")


def _memory_file(stack: ExitStack, content: bytes) -> int:
    """Descriptor of a file in memory with `content`, which nobody can change."""
    descriptor = os.memfd_create("plexrl-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl(descriptor, F_ADD_SEALS, SEALS)
    return descriptor


def _pipe(kept: ExitStack, given: ExitStack, *, is_reversed: bool = False) -> tuple[int, int]:
    """(our end, the end of bubblewrap) of a pipe; bubblewrap reads from a reversed one."""
    ours, other = reversed(os.pipe()) if is_reversed else os.pipe()
    kept.callback(os.close, ours)
    given.callback(os.close, other)
    return ours, other


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes and wait for bubblewrap; end it if it has not ended."""
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _watch(child: SandboxProcess, deadline: float) -> str | None:
    """Read the outputs until the program has ended; what ended it: `wall`, `output` or None."""
    poll = select.poll()
    streams = {each.descriptor: each for each in child.streams}
    for each in (*streams, child.status_fd):
        poll.register(each, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(math.ceil(left * 1000)):
            if descriptor == child.status_fd:
                return None
            stream = streams[descriptor]
            stream.read()
            if stream.is_over:
                return "output"
            if not stream.is_open:
                poll.unregister(descriptor)
    # This thread may be late: the program may have ended in time.
    ended = select.poll()
    ended.register(child.status_fd, select.POLLIN)
    return None if ended.poll(0) else "wall"


def _result(child: SandboxProcess, ended_by: str | None, wall_s: float) -> ProgramRun:
    """The result of a run that was ended by `ended_by`, or by itself."""
    out, err = (bytes(stream.content) for stream in child.streams)
    code = child.exit_code() if ended_by is None else None
    if ended_by is None and code is None:
        raise not_started(child.streams[1], "no reason given")
    limit = ended_by if ended_by != "wall" else None
    if code is not None and any(stream.is_over for stream in child.streams):
        limit = "output"
    limit = limit or (SIGNAL_LIMITS.get(code) if code is not None else None)
    ending = Ending.EXITED if limit is None else Ending.KILLED
    return ProgramRun(
        ending=Ending.TIMED_OUT if ended_by == "wall" else ending,
        exit_code=None if limit else code,
        limit=limit,
        stdout=out,
        stderr=err,
        wall_s=wall_s,
    )
