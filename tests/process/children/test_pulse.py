"""A part that makes no progress is named, killed and replaced; one that is only slow is not."""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import hypothesis.strategies as st
import psutil
import pytest
from hypothesis import given

from plexrl.errors import InvalidRequestError
from plexrl.process.children.part import Part
from plexrl.process.children.processes import PartProcesses
from plexrl.process.children.pulse import BEAT_S, Pulse, check_stuck_s
from plexrl.process.children.restart_log import PartRecord, read_parts
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import DEADLINE_S, wait_until

STUCK_S = 3.0


def test_silence_counts_from_the_last_beat_and_only_after_a_first_one() -> None:
    pulse = Pulse(10.0)
    for second in range(100):
        pulse.look(float(second))
    assert not pulse.is_late, "it may be a process that sends no beats"
    pulse.beat()
    for second in range(100, 103):
        pulse.look(float(second))
    assert (pulse.silent_s, pulse.is_late, pulse.is_stuck) == (3.0, True, False)
    for second in range(103, 111):
        pulse.look(float(second))
    assert pulse.is_stuck
    pulse.beat()
    assert not pulse.is_late


def test_a_watcher_that_was_itself_suspended_blames_nobody() -> None:
    pulse = Pulse(10.0)
    pulse.beat()
    pulse.look(0.0)
    pulse.look(1e6)
    assert not pulse.is_stuck


@given(st.lists(st.tuples(st.floats(0.0, 2 * BEAT_S), st.booleans())))
def test_the_silence_is_the_time_since_the_last_beat(looks: list[tuple[float, bool]]) -> None:
    pulse, now, beaten_at = Pulse(5.0), 0.0, 0.0
    pulse.beat()
    pulse.look(now)
    for pause_s, beats in looks:
        now += pause_s
        pulse.look(now)
        if beats:
            pulse.beat()
            beaten_at = now
        assert pulse.silent_s == pytest.approx(now - beaten_at)
        assert pulse.is_stuck == (pulse.silent_s > 5.0)
        assert pulse.is_late == (pulse.silent_s > 2 * BEAT_S)


def test_a_limit_of_0_never_ends_a_process() -> None:
    pulse = Pulse(0.0)
    pulse.beat()
    for second in range(10_000):
        pulse.look(float(second))
    assert not pulse.is_late
    assert not pulse.is_stuck


@pytest.mark.parametrize("stuck_s", [-1.0, 0.5, 1e9, float("nan"), float("inf")])
def test_a_limit_that_no_beat_can_meet_is_refused(stuck_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="part_stuck_s"):
        check_stuck_s("part_stuck_s", stuck_s)


class Watched:
    """A part that beats, and is watched."""

    def __init__(self, tmp_path: Path, stuck_s: float) -> None:
        self.folders = Folders(tmp_path / "data", tmp_path / "run", tmp_path / "memory")
        self.folders.make()
        self.pids, self.hang, self.fifo = (tmp_path / each for each in ("pids", "hang", "fifo"))
        self.inner = self.folders.run / "node"
        names = {name: str(getattr(self, name)) for name in ("pids", "hang", "fifo")}
        self.part = Part(
            "beating",
            "tests.process.children.part_that_beats",
            names,
            (self.folders.run, self.inner),
        )
        self.record = PartRecord(tmp_path / "parts.json")
        self.parts_file = tmp_path / "parts.json"
        self.processes = PartProcesses(self.folders, self.record, stuck_s=stuck_s)

    def started(self) -> list[int]:
        """Process ids of all starts so far."""
        return [int(line) for line in self.pids.read_text().splitlines()]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(wait_until, condition, what)

    async def until_replaced(self) -> None:
        await self.until(lambda: len(self.started()) == 2, "it is not replaced")
        await self.until(
            lambda: read_parts(self.parts_file)["beating"].restarts == 1, "it does not serve again"
        )
        assert not psutil.pid_exists(self.started()[0]) or (
            psutil.Process(self.started()[0]).status() == psutil.STATUS_ZOMBIE
        )


def watched(tmp_path: Path, test: Callable[[Watched], Awaitable[None]], stuck_s: float) -> None:
    """Run `test` with a watched part."""

    async def run() -> None:
        watched = Watched(tmp_path, stuck_s)
        async with asyncio.timeout(DEADLINE_S):
            await watched.processes.start(watched.part)
        watched.processes.watch((watched.part,))
        try:
            await test(watched)
        finally:
            await watched.processes.unwatch()
            for pid in watched.started():
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGCONT)
            await watched.processes.end(watched.part)

    asyncio.run(run())


def test_a_stopped_part_is_named_and_replaced(tmp_path: Path) -> None:
    async def test(watched: Watched) -> None:
        os.kill(watched.started()[0], signal.SIGSTOP)

        def is_named() -> bool:
            history = read_parts(watched.parts_file).get("beating")
            return history is not None and history.stuck_since is not None

        await watched.until(is_named, "nobody is told")
        await watched.until_replaced()
        assert not is_named()

    watched(tmp_path, test, STUCK_S)


def test_a_part_that_is_stopped_for_less_than_the_limit_survives(tmp_path: Path) -> None:
    async def test(watched: Watched) -> None:
        (pid,) = watched.started()
        os.kill(pid, signal.SIGSTOP)

        def is_named() -> bool:
            history = read_parts(watched.parts_file).get("beating")
            return history is not None and history.stuck_since is not None

        await watched.until(is_named, "nobody is told")
        os.kill(pid, signal.SIGCONT)
        await watched.until(lambda: not is_named(), "it answers, and is still named")
        assert watched.started() == [pid]

    watched(tmp_path, test, 20.0)


def test_a_part_whose_event_loop_hangs_is_replaced(tmp_path: Path) -> None:
    async def test(watched: Watched) -> None:
        watched.hang.touch()
        await watched.until_replaced()

    watched(tmp_path, test, STUCK_S)


def test_a_part_whose_threads_wait_for_a_stalled_file_is_replaced(tmp_path: Path) -> None:
    async def test(watched: Watched) -> None:
        os.mkfifo(watched.fifo)
        await watched.until(lambda: len(watched.started()) == 2, "it is not replaced")
        watched.fifo.unlink()

    watched(tmp_path, test, STUCK_S)


def test_a_removed_folder_is_made_again_and_its_part_replaced(tmp_path: Path) -> None:
    async def test(watched: Watched) -> None:
        shutil.rmtree(watched.folders.run)
        await watched.until_replaced()
        assert watched.inner.is_dir()

    watched(tmp_path, test, 0.0)
