"""A part that dies is restarted, whatever it leaves behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from plexrl.errors import UnavailableError
from plexrl.process.children.part import Part
from plexrl.process.children.processes import PartProcesses
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[3]


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_killed_part_is_restarted_though_its_child_holds_its_output(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
    folders.make()
    part = Part("leaky", "tests.process.children.part_with_children", {"pids": str(pids)})

    def orphans() -> list[int]:
        return [int(line) for line in pids.read_text().splitlines()]

    async def run() -> None:
        processes = PartProcesses(folders)
        await processes.start(part)
        processes.watch((part,))
        first = orphans()[0]
        os.kill(psutil.Process(first).ppid(), signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: len(orphans()) == 2, "the part is not started again"
        )
        assert not is_running(first)
        await processes.unwatch()
        await processes.end(part)
        os.kill(orphans()[1], signal.SIGKILL)

    asyncio.run(run())


def starting_part(folders: Folders, pids: Path, **config: object) -> Part:
    folders.make()
    served = str(pids.with_name("served"))
    usual = {"hangs": False, "works_s": 0.0, "ends_s": 0.0, "child": ""}
    fields = {"pids": str(pids), "served": served, **usual, **config}
    return Part("slow", "tests.process.children.part_that_starts", fields)


def started(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_slow_start_that_makes_progress_is_not_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
    part = starting_part(folders, pids, works_s=1.5)

    async def run() -> None:
        processes = PartProcesses(folders, start_sleep_s_max=1.0)
        async with asyncio.timeout(DEADLINE_S):
            await processes.start(part)
        processes.watch((part,))
        (first,) = started(pids)
        os.kill(first, signal.SIGKILL)
        served = pids.with_name("served")
        await asyncio.to_thread(
            wait_until, lambda: len(started(served)) == 2, "the part is not started again"
        )
        assert started(pids) == started(served)
        await processes.unwatch()
        await processes.end(part)

    asyncio.run(run())


def test_a_part_that_works_while_stopping_is_not_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
    part = starting_part(folders, pids, ends_s=1.5)

    async def run() -> None:
        processes = PartProcesses(folders, stop_sleep_s_max=1.0)
        await processes.start(part)
        async with asyncio.timeout(DEADLINE_S):
            await processes.end(part)

    asyncio.run(run())
    assert started(pids.with_name("served"))[-1] == 0


def test_a_part_that_hangs_while_its_child_works_is_killed(tmp_path: Path) -> None:
    pids, child = tmp_path / "pids", tmp_path / "child"
    folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
    part = starting_part(folders, pids, child=str(child))

    async def run() -> None:
        processes = PartProcesses(folders, stop_sleep_s_max=0.5)
        await processes.start(part)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await processes.end(part)
        finally:
            os.kill(int(child.read_text()), signal.SIGKILL)

    asyncio.run(run())
    assert not is_running(int(pids.read_text()))


def test_a_hanging_start_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
    part = starting_part(folders, pids, hangs=True)

    async def run() -> None:
        processes = PartProcesses(folders, start_sleep_s_max=0.5)
        with pytest.raises(UnavailableError, match="did nothing for"):
            async with asyncio.timeout(DEADLINE_S):
                await processes.start(part)
        await processes.end(part)

    asyncio.run(run())
    assert not is_running(int(pids.read_text()))


def test_a_failed_start_is_noticed_though_its_child_holds_its_output(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
    folders.make()
    part = Part(
        "leaky",
        "tests.process.children.part_with_children",
        {"pids": str(pids), "ends": True},
    )

    async def run() -> None:
        processes = PartProcesses(folders)
        with pytest.raises(UnavailableError, match="it ended"):
            async with asyncio.timeout(DEADLINE_S / 2):
                await processes.start(part)

    asyncio.run(run())
    os.kill(int(pids.read_text()), signal.SIGKILL)


def test_a_process_whose_parent_died_early_ends() -> None:
    script = """
        import os, sys, time
        from plexrl.process.children.lifeline import die_with_parent

        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.001)
        die_with_parent(parent=parent)
        print("it lives")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout == ""
