"""The process of one controller, in the sandbox of rewards. Unlike a program there it has a
network, by which it reaches the routers, and it may run for a day."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import plexrl
from plexrl.process.sandbox.command import PROGRAM_FOLDER, sandbox_command
from plexrl.process.sandbox.limits import Limits
from plexrl.process.sandbox.seccomp import compile_filter
from plexrl.runs.records import RunSpec

PROCESSES = 256
OPEN_FILES = 1024
SCRATCH_BYTES = 256 << 20
CA_FILE = "/cluster/ca.pem"
"""Where the script sees the authority of the routers' certificates."""
ADDRESSES = ("/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf")
"""Files by which it finds the addresses of names."""


class ControllerProcess:
    """A controller that runs. It ends with this process."""

    def __init__(
        self, spec: RunSpec, environment: Mapping[str, str], log: Path, *, ca: str = ""
    ) -> None:
        """Start it; what it prints is appended to `log`. It sees the file `ca` as `CA_FILE`.

        Raises:
            SandboxError: it cannot be contained on this machine.
        """
        # Not the folder around it, which may be a checkout with anything in it.
        package = Path(plexrl.__file__).parent
        command = sandbox_command([Path(sys.prefix), package])
        limits = Limits(
            memory_bytes=spec.memory_bytes,
            cpu_s=spec.cpu_s,
            processes=PROCESSES,
            open_files=OPEN_FILES,
            tmp_bytes=SCRATCH_BYTES,
        )
        with ExitStack() as stack:
            files = [(name, _descriptor(stack, content)) for name, content in spec.files.items()]
            filter_fd = _descriptor(stack, compile_filter())
            # bubblewrap waits for a byte before it starts the program.
            go_fd = _descriptor(stack, b"1")
            status = stack.enter_context(open(os.devnull, "wb"))  # noqa: PTH123 - a device
            words = command.arguments(
                limits, files, seccomp=filter_fd, status=status.fileno(), go=go_fd
            )
            # The key is no word of the command line, which every user of the head could read.
            variables = _descriptor(stack, _variables(environment, package.parent))
            at = words.index("--clearenv") + 1
            words[at:at] = ["--share-net", "--args", str(variables)]
            shown = [word for path in ADDRESSES for word in ("--ro-bind-try", path, path)]
            opened = [variables]
            if ca:
                opened.append(_descriptor(stack, Path(ca).read_bytes()))
                shown += ["--perms", "0444", "--file", str(opened[-1]), CA_FILE]
            at = words.index("--dir") - 2
            words[at:at] = shown
            words += [sys.executable, "-u", f"{PROGRAM_FOLDER}/{spec.script}", *spec.arguments]
            output = stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(filter_fd, go_fd, status.fileno(), *opened, *(fd for _, fd in files)),
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """128 + the number of the signal that ended it; None: it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def kill(self) -> None:
        """End it and all that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _variables(environment: Mapping[str, str], packages: Path) -> bytes:
    """Options that set its environment, as bubblewrap reads them from a file."""
    found = {"PYTHONPATH": str(packages), **environment}
    words = [word for name, value in found.items() for word in ("--setenv", name, value)]
    return "".join(f"{word}\0" for word in words).encode()


def _descriptor(stack: ExitStack, content: bytes) -> int:
    """A descriptor of a nameless file with this content."""
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    file.write(content)
    file.seek(0)
    return file.fileno()
