"""A part that dies is started again, whatever it leaves behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from plexrl.cluster.part_processes import PartProcesses
from plexrl.cluster.parts import Folders, Part
from tests.cluster.tools import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    """An orphan that nobody reaps is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_killed_part_is_started_again_though_its_child_holds_its_output(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
    folders.make()
    part = Part("leaky", "tests.cluster.part_with_children", {"pids": str(pids)})

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


def test_a_process_whose_parent_died_before_it_could_say_so_ends() -> None:
    script = """
        import os, sys, time
        from plexrl.cluster.lifeline import die_with_parent

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
