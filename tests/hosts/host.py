"""One simulated host: namespaces of its own, a disk that survives a power cut, processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.hosts.leftovers import record
from tests.hosts.loop_disk import LoopDisk

REPOSITORY = Path(__file__).parents[2]
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--time")
READY_S = 60.0
END_S = 30.0
HOME = "/root"
CONFIGURATION = (Path("/etc/alternatives"), Path("/etc/ssl"), Path("/etc/ld.so.conf.d"))
"""Folders of `/etc` that programs need."""
MONOTONIC_STEP_S = 40_000
"""Difference of the monotonic clocks of two hosts, as machines differ that were booted at different
times: a comparison of two hosts' clocks gives nonsense here too."""


class HostProcess:
    """A process on a host that the test started, and what it has printed."""

    def __init__(self, launcher: "subprocess.Popen[bytes]", log: Path) -> None:
        self.log = log
        """What it wrote to standard output and standard error."""
        self._launcher = launcher

    @property
    def pid(self) -> int:
        """Its process id outside of the host."""
        deadline = time.monotonic() + READY_S
        while self._launcher.poll() is None:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._launcher.pid).children()
                if children:
                    return int(children[0].pid)
            assert time.monotonic() < deadline, f"nsenter started nothing: {self.text()}"
            time.sleep(0.01)
        raise AssertionError(f"ended with {self._launcher.returncode}: {self.text()}")

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._launcher.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; returns the exit status."""
        return self._launcher.wait(timeout_s)

    def send(self, text: str) -> None:
        """Write to its standard input."""
        assert self._launcher.stdin is not None
        self._launcher.stdin.write(text.encode())
        self._launcher.stdin.flush()

    def text(self) -> str:
        """Everything that it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = READY_S) -> str:
        """Wait until it has printed `text`; returns the first line that has it."""
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self.poll() is not None
            for line in self.text().splitlines():
                if text in line:
                    return line
            assert not has_ended, f"ended with {self.poll()} before {text!r}: {self.text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {text!r} in: {self.text()[-4000:]}"
            time.sleep(0.02)

    def end(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = END_S) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        if self.poll() is None:
            with suppress(ProcessLookupError, AssertionError):
                os.kill(self.pid, sig)
            with suppress(subprocess.TimeoutExpired):
                return self.wait(timeout_s)
            os.kill(self.pid, signal.SIGKILL)
        return self.wait(timeout_s)

    def close(self) -> None:
        """Release the pipe, once the process has ended or its host has lost its power."""
        self._launcher.kill()
        self._launcher.wait()
        if self._launcher.stdin is not None:
            with suppress(BrokenPipeError):
                self._launcher.stdin.close()


class Host:
    """A host of a `Network`. While it has no power, only `power_on` and `lose` are allowed."""

    def __init__(
        self,
        name: str,
        index: int,
        folder: Path,
        connect: Callable[["Host"], None],
        shared_memory_bytes: int,
        disk_bytes: int | None = None,
    ) -> None:
        """`disk_bytes`: the disk is a file system of its own, of this size, which loses in a power
        cut what was not flushed. None: it is a folder, which loses nothing."""
        self.name = name
        self.index = index
        self.address = f"10.77.0.{index + 1}"
        self.variables: dict[str, str] = {}
        """Environment variables of all commands, besides those of `environment`."""
        self._folder = folder
        self._disk = folder / name
        self._connect = connect
        self._shared_memory_bytes = shared_memory_bytes
        self._init: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._started: list[HostProcess] = []
        self._is_lost = False
        self._disk_bytes = disk_bytes
        self._loop_disk: LoopDisk | None = None

    @property
    def pid(self) -> int:
        """The first process of the host, by its process id outside of the host."""
        assert self._init is not None, f"{self.name} has no power"
        return self._pid

    @property
    def has_power(self) -> bool:
        """Whether it runs."""
        return self._init is not None

    def power_on(self, names: Mapping[str, str] | None = None) -> None:
        """Start the host with its disk; its memory file systems are empty. A host that starts for
        the first time takes `names`, the addresses of all hosts by name."""
        assert self._init is None, f"{self.name} has power already"
        assert not self._is_lost, f"{self.name} is lost"
        if names is not None:
            self._make_disk(names)
        elif self._loop_disk is not None:
            self._loop_disk.mount()
        config = self._folder / f"{self.name}.json"
        config.write_text(
            json.dumps(
                {
                    "name": self.name,
                    "disk": str(self._disk),
                    "read_only": [str(path) for path in read_only_paths()],
                    "shared_memory_bytes": self._shared_memory_bytes,
                }
            )
        )
        program = Path(__file__).with_name("init.py")
        command = [
            *("unshare", *NAMESPACES, "--fork", "--kill-child"),
            *("--monotonic", str((self.index + 1) * MONOTONIC_STEP_S)),
            *(sys.executable, "-I", "-S", str(program), str(config)),
        ]
        with (self._folder / f"{self.name}.init.log").open("w") as errors:
            self._init = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"up\n":
            log = (self._folder / f"{self.name}.init.log").read_text()
            raise AssertionError(f"{self.name} did not start: {log}")
        self._pid = int(psutil.Process(self._init.pid).children()[0].pid)
        record(self._folder, self.name, self._pid)
        self._connect(self)

    def power_off(self) -> None:
        """Cut the power: every process is killed at once, and what lay in memory is lost."""
        os.kill(self.pid, signal.SIGKILL)
        init, self._init = self._init, None
        assert init is not None
        init.wait()
        for pipe in (init.stdin, init.stdout):
            if pipe is not None:
                pipe.close()
        for process in self._started:
            process.close()
        self._started.clear()
        if self._loop_disk is not None:
            self._loop_disk.cut()

    def flush_disk(self) -> None:
        """Make durable what a test has prepared on the host's disk."""
        if self._loop_disk is not None:
            self._loop_disk.flush()

    def lose(self) -> None:
        """Cut the power for good: the host never comes back, and no host reads its disk again."""
        if self.has_power:
            self.power_off()
        self._is_lost = True

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs `words` on this host with its environment."""
        given = {**environment(), **self.variables, **(env or {})}
        variables = [f"{name}={value}" for name, value in given.items()]
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES, "--root"]
        home = f"--wd=/proc/{self.pid}/root{HOME}"
        return [*enter, home, "env", "--ignore-environment", *variables, *words]

    def run(
        self,
        *words: str,
        timeout_s: float = 120.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command and wait for its end; with `check`, a failure raises with its output."""
        done = subprocess.run(
            self.command(*words, env=env),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{self.name}: {' '.join(words)} ended with {done.returncode}:\n"
                f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> HostProcess:
        """Start a command in a session of its own; it ends with the host at the latest."""
        log = self._folder / f"{self.name}.{len(list(self._folder.glob('*.log')))}.log"
        with log.open("wb") as output:
            launcher = subprocess.Popen(
                self.command("setsid", "--wait", *words, env=env),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = HostProcess(launcher, log)
        self._started.append(process)
        return process

    def path(self, inside: str | Path) -> Path:
        """A path of this host, as a path outside of it."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def on_disk(self, inside: str | Path) -> Path:
        """A path of this host's disk, as a path outside of it; also while it has no power."""
        return self._disk / str(inside).lstrip("/")

    def processes(self, text: str = "") -> list[psutil.Process]:
        """The host's processes whose command line has `text`, by their ids outside of the host."""
        namespace = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
                if (
                    process.pid != self.pid
                    and Path(f"/proc/{process.pid}/ns/pid").readlink() == namespace
                    and text in " ".join(process.cmdline())
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def kill9(self, text: str) -> Sequence[psutil.Process]:
        """SIGKILL to every process whose command line has `text`; at least one must be there."""
        found = self.processes(text)
        assert found, f"{self.name} runs no process with {text!r}"
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return found

    def close(self) -> None:
        """Cut the power, if it has any."""
        if self.has_power:
            self.power_off()
        if self._loop_disk is not None:
            self._loop_disk.unmount()

    def _make_disk(self, names: Mapping[str, str]) -> None:
        """A new disk: a home directory, and copies of the files of this machine's `/etc`."""
        if self._disk_bytes is None:
            self._disk.mkdir()
        else:
            image = self._folder / f"{self.name}.image"
            self._loop_disk = LoopDisk(self._disk, image, self._disk_bytes)
        for folder in (
            HOME,
            "/etc",
            "/home",
            "/var/lib",
            "/var/log",
            "/var/tmp",
            "/opt",
            "/srv",
            "/mnt",
        ):
            self.on_disk(folder).mkdir(parents=True)
        for file in Path("/etc").iterdir():
            if file.is_file() and os.access(file, os.R_OK):
                shutil.copy2(file, self.on_disk("/etc"))
        rows = [("127.0.0.1", "localhost"), *((names[name], name) for name in names)]
        _replace(self.on_disk("/etc/hosts"), "".join(f"{at} {name}\n" for at, name in rows))
        _replace(self.on_disk("/etc/hostname"), f"{self.name}\n")
        # There is no name server in the network: a name that is not in the file fails at once.
        _replace(self.on_disk("/etc/resolv.conf"), "")
        self.flush_disk()


def environment() -> dict[str, str]:
    """The environment of a host's commands: nothing of this process's own but the language."""
    binaries = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "PATH": binaries,
        "HOME": HOME,
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def read_only_paths() -> list[Path]:
    """What every host sees of this machine: its programs, Python, and the repository's sources."""
    python = (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    wanted = [Path("/usr"), *filter(Path.is_dir, CONFIGURATION), REPOSITORY, *python]
    found: list[Path] = []
    for path in wanted:
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
