"""Many programs at a time, without leaks; what users get where the sandbox does not work."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plexrl.errors import InvalidRequestError, SandboxError
from plexrl.process.sandbox import cgroups, command, seccomp
from plexrl.process.sandbox.cgroups import PREFIX, Cgroups
from plexrl.process.sandbox.limits import Ending, Limits, Program
from plexrl.process.sandbox.runner import _watch, start_program
from plexrl.process.sandbox.sandbox import Sandbox
from tests.process.sandbox.processes import processes_of

if TYPE_CHECKING:
    from collections.abc import Callable


def shell(text: str, *arguments: str) -> Program:
    return Program(command=("sh", "-c", text, *arguments))


def groups() -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob(f"{PREFIX}*") if path.is_dir()]


def own_groups() -> list[Path]:
    return [path for path in groups() if path.name.startswith(f"{PREFIX}{os.getpid()}-")]


def grade_many(sandbox: Sandbox, count: int, at_once: int) -> None:
    """Run `count` programs, some of them hostile, and look for what they leave."""
    marker = uuid.uuid4().hex
    texts = (
        "read n; echo $((n * n))",
        "read n; sleep 1000 & echo $((n * n)); exit 3",
        "head -c 100000 /dev/zero > /tmp/x; kill -9 $$",
    )
    with Sandbox(limits=sandbox.limits, at_once=at_once) as many:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        runs = [
            many.submit(
                Program(
                    command=("sh", "-c", texts[index % 3], marker), stdin=f"{index}\n".encode()
                ),
                timeout_s=120.0,
            )
            for index in range(count)
        ]
        for index, each in enumerate(runs):
            run = each.result()
            square = b"%d\n" % index**2
            expected = ((0, square), (3, square), (137, b""))[index % 3]
            assert (run.exit_code, run.stdout) == expected, run
        assert processes_of(marker) == []
        assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
        assert own_groups() == []


def test_programs_run_in_parallel_without_leaks(sandbox: Sandbox) -> None:
    threads = threading.active_count()
    grade_many(sandbox, 24, 8)
    assert threading.active_count() == threads


@pytest.mark.slow
def test_a_thousand_programs_leak_nothing(sandbox: Sandbox) -> None:
    grade_many(sandbox, 200, 32)
    threads, before = threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grade_many(sandbox, 1000, 32)
    assert threading.active_count() == threads
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 16 << 10, f"peak memory grew from {before} to {after} KiB"


def test_programs_run_at_the_same_time(sandbox: Sandbox) -> None:
    # Each ends only after its wall time, so one after another they would need four times as long.
    began = time.monotonic()
    runs = [sandbox.submit(shell("sleep 1000"), timeout_s=3.0) for _ in range(sandbox.at_once)]
    assert {each.result().ending for each in runs} == {Ending.TIMED_OUT}
    assert time.monotonic() - began < 3.0 * sandbox.at_once


def test_event_loop_runs_while_programs_run(sandbox: Sandbox) -> None:
    async def control() -> list[str]:
        order: list[str] = []

        async def program() -> None:
            await sandbox.run_async(shell("sleep 1000"), timeout_s=1.0)
            order.append("program")

        async def loop() -> None:
            await asyncio.sleep(0)
            order.append("loop")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(program())
            tasks.create_task(loop())
        return order

    assert asyncio.run(control()) == ["loop", "program"]


def test_programs_end_with_a_controller_that_is_killed(sandbox: Sandbox) -> None:
    del sandbox
    marker = uuid.uuid4().hex
    source = f"""
from plexrl.process.sandbox.limits import Program
from plexrl.process.sandbox.sandbox import Sandbox
with Sandbox(at_once=2) as sandbox:
    text = "sh -c 'sleep 1000; true' inner-$0 & sleep 1000"
    program = Program(command=("sh", "-c", text, "{marker}"))
    runs = [sandbox.submit(program, timeout_s=1000.0) for _ in range(2)]
    print("submitted", flush=True)
    runs[0].result()
"""
    controller = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert controller.stdout is not None
    assert controller.stdout.readline() == b"submitted\n"
    while len(processes_of(f"inner-{marker}")) < 2:
        assert controller.poll() is None
        time.sleep(0.02)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    controller.stdout.close()
    deadline = time.monotonic() + 60.0
    while processes_of(marker):
        assert time.monotonic() < deadline, processes_of(marker)
        time.sleep(0.02)


def test_program_does_not_start_after_the_controller_was_killed(sandbox: Sandbox) -> None:
    with start_program(
        sandbox._command, shell("echo started"), sandbox.limits, sandbox._filter
    ) as process:
        # What remains of a killed controller: bubblewrap waits no longer, and nobody reads.
        assert process.process.stderr is not None
        process.process.stderr.close()
        process.go()
        process.streams[0].drain()
        process.kill()
    assert process.streams[0].content == b""


def test_program_that_ended_before_a_late_look_has_not_timed_out(sandbox: Sandbox) -> None:
    with start_program(
        sandbox._command, shell("sleep 1"), sandbox.limits, sandbox._filter
    ) as process:
        process.go()
        assert _watch(process, time.monotonic()) == "wall"
        process.process.wait()
        assert _watch(process, time.monotonic() - 1.0) is None
        process.kill()


def test_standard_error_is_the_programs_own(sandbox: Sandbox) -> None:
    text = "printf 'a\\006b' >&2"
    assert sandbox.run(shell(text), timeout_s=60.0).stderr == b"a\x06b"


def test_file_of_a_program_may_be_its_command(sandbox: Sandbox) -> None:
    files = {"run": b"#!/bin/sh\necho ran\n"}
    found = sandbox.run(Program(command=("/program/run",), files=files), timeout_s=60.0)
    assert (found.exit_code, found.stdout) == (0, b"ran\n")
    for missing in ("/program/other", "/programs/run"):
        with pytest.raises(SandboxError, match=f"no program '{missing}'"):
            sandbox.run(Program(command=(missing,), files=files), timeout_s=60.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a namespace of processes like this")
def test_controller_that_is_process_1_of_a_container_keeps_no_zombies(sandbox: Sandbox) -> None:
    del sandbox
    source = """
from pathlib import Path
from plexrl.process.sandbox.limits import Program
from plexrl.process.sandbox.sandbox import Sandbox
with Sandbox(at_once=2, control_groups=False) as sandbox:
    runs = [sandbox.submit(Program(command=("true",)), timeout_s=60.0) for _ in range(10)]
    assert [each.result().exit_code for each in runs] == [0] * 10
print(sorted(path.name for path in Path("/proc").iterdir() if path.name.isdigit()))
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", source]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout == "['1']\n", found.stderr


def test_groups_of_a_killed_controller_are_removed_by_the_next_one(sandbox: Sandbox) -> None:
    if not sandbox.has_control_groups:
        pytest.skip("this process may make no control groups; docs/rewards.md says how")
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert sandbox._groups is not None
    parents = sandbox._groups._parents
    left = [parent / f"{PREFIX}{ended.pid}-0" for parent in parents]
    for each in left:
        each.mkdir()
    with Sandbox(at_once=1):
        assert not any(each.exists() for each in left)


def test_group_that_cannot_be_made_removes_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = (tmp_path / "memory", tmp_path / "pids")
    for parent in parents:
        parent.mkdir()
    monkeypatch.setattr(cgroups, "_unique_name", lambda: "taken")
    (parents[1] / "taken").mkdir()
    made = Cgroups(parents, 1)
    with (
        pytest.raises(SandboxError, match="could not make a control group"),
        made.group(Limits()),
    ):
        pass
    assert not (parents[0] / "taken").exists()
    assert (parents[1] / "taken").is_dir()


def test_second_folder_of_a_group_is_removed_even_if_the_first_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = (tmp_path / "memory", tmp_path / "pids")
    for parent in parents:
        parent.mkdir()
    removed = []

    def remove(folder: Path) -> None:
        removed.append(folder.parent)
        raise OSError("busy")

    monkeypatch.setattr(cgroups, "_remove", remove)
    with pytest.raises(OSError, match="busy"), Cgroups(parents, 1).group(Limits()):
        pass
    assert sorted(removed) == sorted(parents)


def test_sandboxes_of_a_process_run_beside_each_other(sandbox: Sandbox) -> None:
    with Sandbox(limits=sandbox.limits, at_once=1) as other:
        long = other.submit(shell("sleep 0.5; echo a"), timeout_s=60.0)
        runs = [sandbox.run(shell("echo b"), timeout_s=60.0).stdout for _ in range(4)]
        assert (runs, long.result().stdout) == ([b"b\n"] * 4, b"a\n")


def test_folders_that_are_asked_for_can_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    del sandbox
    tmp_path.chmod(0o755)
    (tmp_path / "data.txt").write_text("some data")
    with Sandbox(at_once=1, folders=[tmp_path]) as wider:
        found = wider.run(shell(f"cat {tmp_path}/data.txt; echo x > {tmp_path}/y"), timeout_s=60.0)
    assert found.stdout == b"some data"
    assert b"Read-only file system" in found.stderr
    assert found.exit_code == 2


def test_fault_of_the_sandbox_is_an_error_with_its_words(sandbox: Sandbox, tmp_path: Path) -> None:
    del sandbox
    folder = tmp_path / "short-lived"
    folder.mkdir()
    with Sandbox(at_once=1, folders=[folder]) as short:
        folder.rmdir()
        with pytest.raises(SandboxError, match=r"could not start the program: .*short-lived"):
            short.run(shell("true"), timeout_s=60.0)


def test_closed_sandbox_refuses_programs(sandbox: Sandbox) -> None:
    with Sandbox(limits=sandbox.limits, at_once=1) as closed:
        pass
    calls: list[Callable[[], object]] = [
        lambda: closed.run(shell("true"), timeout_s=60.0),
        lambda: closed.submit(shell("true"), timeout_s=60.0),
        lambda: closed.open_session(shell("cat")),
    ]
    for call in calls:
        with pytest.raises(SandboxError, match="the sandbox is closed"):
            call()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_time_without_meaning_is_refused(sandbox: Sandbox, timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"timeout_s is {timeout_s}"):
        sandbox.run(shell("true"), timeout_s=timeout_s)


def test_command_that_is_too_long_is_a_fault_of_the_sandbox(sandbox: Sandbox) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SandboxError, match=r"could not start the program: .*too long"):
        sandbox.run(shell("true", "x" * (1 << 20)), timeout_s=60.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_missing_bubblewrap_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PROGRAMS", "/nowhere")
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        Sandbox()


def test_missing_binding_of_libseccomp_is_named(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    del sandbox
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(SandboxError, match=r"pip install 'plexrl\[rewards\]'"):
        seccomp.compile_filter()


def test_folder_that_does_not_exist_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    del sandbox
    with pytest.raises(SandboxError, match=f"{tmp_path}/no, which is no folder"):
        Sandbox(folders=[tmp_path / "no"])


@pytest.mark.parametrize("name", ["memory_bytes", "cpu_s", "processes", "output_bytes"])
def test_limits_without_meaning_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is 0; it must be"):
        Limits(**{name: 0})


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/passwd"])
def test_files_of_a_program_stay_in_their_folder(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="without '/'"):
        Program(command=("true",), files={name: b""})
