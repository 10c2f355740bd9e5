"""Each hostile program is contained: its run ends, nothing of it is left, other programs pass."""

import socket
import textwrap
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from plexrl.process.sandbox.limits import Ending, Limits, Program, ProgramRun
from plexrl.process.sandbox.sandbox import Sandbox
from tests.process.sandbox.processes import processes_of
from tests.sandboxes import LIMITS

TIMEOUT_S = 60.0
"""Of programs that end by themselves, on a busy machine."""
NEIGHBOUR = b"print(sum(int(each) for each in input().split()))"


@dataclass(frozen=True)
class Contained:
    """The run of a hostile program, beside which others have run unharmed."""

    run: ProgramRun
    marker: str

    @property
    def answer(self) -> str:
        """What it printed."""
        assert self.run.ending is Ending.EXITED, self.run
        return self.run.stdout.decode().strip()


Contain = Callable[..., Contained]


def python(source: str, *arguments: str, stdin: bytes = b"") -> Program:
    return Program(
        command=("python3", "/program/main.py", *arguments),
        files={"main.py": textwrap.dedent(source).encode()},
        stdin=stdin,
    )


@pytest.fixture
def contain(sandbox: Sandbox) -> Contain:
    """Runs a hostile program between two harmless ones."""

    def run(source: str, *, timeout_s: float = TIMEOUT_S, **options: bytes) -> Contained:
        marker = uuid.uuid4().hex
        hostile = sandbox.submit(python(source, marker, **options), timeout_s=timeout_s)
        sums = [
            sandbox.submit(python(NEIGHBOUR.decode(), stdin=f"{i} 2 3".encode()), timeout_s=60.0)
            for i in range(2)
        ]
        found = Contained(hostile.result(), marker)
        assert [each.result().stdout for each in sums] == [b"5\n", b"6\n"]
        assert processes_of(marker) == []
        return found

    return run


def test_endless_loop_is_ended_at_its_wall_time(contain: Contain) -> None:
    run = contain("while True: pass", timeout_s=1.0).run
    assert run.ending is Ending.TIMED_OUT
    assert run.exit_code is None


def test_sleep_is_ended_at_its_wall_time(contain: Contain) -> None:
    assert contain("import time; time.sleep(1e6)", timeout_s=1.0).run.ending is Ending.TIMED_OUT


@pytest.mark.usefixtures("sandbox")
def test_cpu_time_is_bounded() -> None:
    with Sandbox(limits=Limits(cpu_s=1), at_once=1) as strict:
        run = strict.run(python("while True: pass"), timeout_s=TIMEOUT_S)
    assert (run.ending, run.limit) == (Ending.KILLED, "cpu")


def test_fork_bomb_reaches_the_limit_of_processes(contain: Contain) -> None:
    run = contain(
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        timeout_s=2.0,
    ).run
    assert run.ending is Ending.TIMED_OUT


def test_processes_are_limited_in_each_sandbox_by_itself(contain: Contain) -> None:
    found = contain(
        """
        import os, signal
        children = []
        try:
            for _ in range(1000):
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        except OSError as error:
            print(error.errno, len(children))
        """
    )
    errno, children = map(int, found.answer.split())
    assert errno == 11
    # One is bubblewrap's, one the program itself.
    assert children == LIMITS.processes - 2


def test_memory_bomb_of_one_process_fails_to_allocate(contain: Contain) -> None:
    found = contain(
        """
        held = []
        try:
            while True:
                held.append(bytearray(1 << 20))
        except MemoryError:
            count = len(held)
            held.clear()
            print(count)
        """
    )
    assert 100 < int(found.answer) < 256


def test_memory_bomb_of_many_processes_is_killed(contain: Contain, sandbox: Sandbox) -> None:
    if not sandbox.has_control_groups:
        pytest.skip("this process may make no control groups; docs/rewards.md says how")
    run = contain(
        """
        import os, signal
        for _ in range(16):
            if os.fork() == 0:
                held = bytearray(100 << 20)
                signal.pause()
        os.wait()
        """
    ).run
    assert (run.ending, run.limit) == (Ending.KILLED, "memory")


def test_there_is_no_network(contain: Contain) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = contain(
            f"""
            import socket
            for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
                try:
                    socket.create_connection(address, 5)
                    print("connected")
                except OSError as error:
                    print(error.errno)
            for family in (socket.AF_NETLINK, socket.AF_VSOCK, socket.AF_PACKET):
                try:
                    socket.socket(family, socket.SOCK_RAW)
                    print("made")
                except OSError as error:
                    print(error.errno)
            """
        )
    # Refused; unreachable; not permitted.
    assert found.answer.splitlines() == ["111", "101", "1", "1", "1"]


def test_abstract_unix_sockets_of_the_machine_are_out_of_reach(contain: Contain) -> None:
    name = f"plexrl-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        found = contain(
            f"""
            import socket
            try:
                socket.socket(socket.AF_UNIX).connect("\\0{name}")
                print("connected")
            except OSError as error:
                print(error.errno)
            """
        )
    assert found.answer == "111"


def test_files_of_the_controller_are_not_visible(contain: Contain, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    here = Path(__file__)
    found = contain(
        f"""
        import os
        for path in ({str(secret)!r}, {str(here)!r}, "/etc/passwd", "/etc/shadow", "/home", "/var"):
            print(os.path.exists(path))
        for root in ("/proc/1/root", "/proc/self/root", "/tmp/../../..", "/proc/1/cwd"):
            print(os.path.exists(root + {str(secret)!r}))
        os.symlink("/", "/tmp/link")
        print(os.path.exists("/tmp/link" + {str(secret)!r}))
        """
    )
    assert found.answer.split() == ["False"] * 11


def test_nothing_but_tmp_can_be_written(contain: Contain) -> None:
    found = contain(
        """
        import os
        os.symlink("/usr/bin", "/tmp/link")
        paths = ["/x", "/usr/x", "/dev/x", "/program/x", "/program/main.py", "/etc/x"]
        paths += ["/tmp/link/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"]
        for path in paths:
            try:
                open(path, "w").write("x")
                print("wrote", path)
            except OSError:
                print("no")
        for path in ("/tmp/x", "/dev/null", "/dev/shm/x"):
            open(path, "w").write("x")
        """
    )
    assert found.answer.splitlines() == ["no"] * 9


def test_full_tmp_harms_only_its_program(contain: Contain) -> None:
    found = contain(
        """
        import errno
        written, index = 0, 0
        try:
            while True:
                with open(f"/tmp/{index}", "wb", buffering=0) as file:
                    for _ in range(4):
                        written += file.write(bytes(1 << 20))
                index += 1
        except OSError as error:
            print(errno.errorcode[error.errno], written <= 8 << 20)
        """
    )
    assert found.answer == "ENOSPC True"


def test_one_large_file_is_bounded(contain: Contain) -> None:
    found = contain(
        """
        import errno
        try:
            with open("/dev/shm/x", "wb", buffering=0) as file:
                file.truncate(1 << 40)
        except OSError as error:
            print(errno.errorcode[error.errno])
        """
    )
    assert found.answer == "EFBIG"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output_is_cut(contain: Contain, stream: str) -> None:
    run = contain(
        f"""
        import sys
        while True:
            sys.{stream}.write("x" * 65536)
        """
    ).run
    assert (run.ending, run.limit) == (Ending.KILLED, "output")
    assert len(run.stdout) + len(run.stderr) == LIMITS.output_bytes


def test_signals_to_all_processes_end_only_its_own(contain: Contain) -> None:
    found = contain(
        """
        import os, signal
        child = os.fork()
        if child == 0:
            signal.pause()
        os.kill(-1, signal.SIGKILL)
        print(os.WTERMSIG(os.wait()[1]))
        os.kill(1, signal.SIGKILL)
        print("alive")
        """
    )
    assert found.answer.split() == ["9", "alive"]


def test_kill_of_itself_is_the_end_of_the_program(contain: Contain) -> None:
    run = contain("import os; os.kill(os.getpid(), 9)").run
    assert (run.ending, run.exit_code) == (Ending.EXITED, 128 + 9)


def test_ignored_signals_do_not_keep_it_alive(contain: Contain) -> None:
    run = contain(
        """
        import signal
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
        """,
        timeout_s=1.0,
    ).run
    assert run.ending is Ending.TIMED_OUT


def test_children_left_behind_are_ended(contain: Contain) -> None:
    found = contain(
        """
        import os, signal
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    signal.pause()
                os._exit(0)
        print("gone")
        """
    )
    assert found.answer == "gone"


def test_children_do_not_delay_the_end_by_the_open_output(contain: Contain) -> None:
    run = contain(
        """
        import os, time
        if os.fork() == 0:
            time.sleep(1e6)
        print("parent")
        """
    ).run
    assert (run.ending, run.stdout) == (Ending.EXITED, b"parent\n")


def test_stopped_program_is_ended(contain: Contain) -> None:
    run = contain("import os; os.kill(os.getpid(), 19)", timeout_s=1.0).run
    assert run.ending is Ending.TIMED_OUT


def test_environment_of_the_controller_is_hidden(
    contain: Contain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLEXRL_API_KEY", "a-secret-key")
    found = contain(
        """
        import os
        everything = str(os.environ)
        for folder in os.listdir("/proc"):
            if folder.isdigit():
                for name in ("environ", "cmdline"):
                    everything += open(f"/proc/{folder}/{name}").read()
        print("secret" in everything, sorted(f for f in os.listdir("/proc") if f.isdigit()))
        """
    )
    assert found.answer == "False ['1', '2']"


def test_memory_of_other_processes_is_out_of_reach(contain: Contain) -> None:
    found = contain(
        """
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for target in (1, 2):
            print(libc.ptrace(16, target, 0, 0), errno.errorcode[ctypes.get_errno()])
        # unshare of a user namespace, in which it would have all capabilities
        print(libc.unshare(0x10000000), errno.errorcode[ctypes.get_errno()])
        print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), errno.errorcode[ctypes.get_errno()])
        """
    )
    assert set(found.answer.splitlines()) == {"-1 EPERM"}


def test_no_descriptor_of_the_controller_is_open(contain: Contain) -> None:
    found = contain(
        """
        import os
        held = [each for each in range(3, 256) if os.path.exists(f"/proc/self/fd/{each}")]
        print(held, {os.path.exists(f"/proc/1/fd/{each}") for each in (100,)})
        """
    )
    assert found.answer == "[] {False}"


def test_standard_input_cannot_grow(contain: Contain) -> None:
    found = contain(
        """
        import os
        try:
            descriptor = os.open("/proc/self/fd/0", os.O_RDWR)
            os.write(descriptor, b"x" * 4096)
            print("wrote")
        except OSError:
            print("no")
        """,
        stdin=b"some input",
    )
    assert found.answer == "no"


def test_open_files_are_limited(contain: Contain) -> None:
    found = contain(
        """
        held = []
        try:
            while True:
                held.append(open("/dev/null"))
        except OSError as error:
            print(error.errno, len(held) < 256)
        """
    )
    assert found.answer == "24 True"


def test_set_user_id_programs_give_no_rights(contain: Contain) -> None:
    found = contain(
        """
        import os, subprocess
        print(open("/proc/self/status").read().split("NoNewPrivs:")[1].split()[0])
        try:
            os.setuid(0)
            print("root")
        except OSError:
            print("no")
        """
    )
    assert found.answer.split() == ["1", "no"]
