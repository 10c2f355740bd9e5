"""The agent kills a worker that gives no sign of life, and names what is wrong on its node."""

import asyncio
import os
import signal
from pathlib import Path

from plexrl.process.conditions import Condition
from plexrl.worker.agent.node_conditions import NodeConditions
from plexrl.worker.interface.config import WorkerConfig
from tests.statemanager.conftest import Daemon, StartDaemon, daemon, make_shard, start_daemon
from tests.statemanager.test_node_agent_state import run_dir
from tests.worker.agent.test_agent import FakeLauncher, FakeWorker, Plain, Scheduler, agent_of

__all__ = ["daemon", "make_shard", "run_dir", "start_daemon"]

STUCK_S = 4.0


class BeatingWorker(FakeWorker):
    """A worker that has given one sign of life."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.beat()

    def beat(self) -> None:
        self._says.send(None)


class BeatingLauncher(FakeLauncher):
    """Starts workers that beat when they are told to."""

    def start(self, config: WorkerConfig) -> FakeWorker:
        self.workers.append(BeatingWorker(config))
        return self.workers[-1]


async def condition(scheduler: Scheduler, code: str) -> Plain:
    """The next report that has a condition of this code."""
    while True:
        for each in await scheduler.conditions.get():
            if each["code"] == code:
                return each


def test_a_silent_worker_is_named_and_then_killed(run_dir: Path, daemon: Daemon) -> None:
    launcher = BeatingLauncher()

    async def work() -> None:
        async with agent_of(run_dir, daemon, launcher, part_stuck_s=STUCK_S) as scheduler:
            await scheduler.launch(1)
            assert await scheduler.ready() == 1
            named = await condition(scheduler, "part_stuck")
            assert "worker of j/actor rank 0 on node node0 does not answer" in named["message"]
            ended = await scheduler.exits.get()
            assert "gave no sign of life for 4 s" in ended["reason"]
            assert launcher.living() == []
            assert await scheduler.conditions.get() == []

    asyncio.run(work())


def test_a_worker_that_beats_lives_however_long_it_computes(run_dir: Path, daemon: Daemon) -> None:
    launcher = BeatingLauncher()

    async def work() -> None:
        async with agent_of(run_dir, daemon, launcher, part_stuck_s=STUCK_S) as scheduler:
            await scheduler.launch(1)
            assert await scheduler.ready() == 1
            (worker,) = launcher.workers
            assert isinstance(worker, BeatingWorker)
            for _ in range(int(2 * STUCK_S / 0.5)):
                worker.beat()
                await asyncio.sleep(0.5)
            assert launcher.living() == [1]
            assert scheduler.exits.empty()

    asyncio.run(work())


def test_a_stopped_statemanager_is_named(run_dir: Path, start_daemon: StartDaemon) -> None:
    stopped = start_daemon()
    process = stopped.process
    assert process is not None

    async def work() -> None:
        async with agent_of(run_dir, stopped, FakeLauncher(), part_stuck_s=STUCK_S) as scheduler:
            os.kill(process.pid, signal.SIGSTOP)
            named = await condition(scheduler, "part_stuck")
            assert "the StateManager of node node0 does not answer" in named["message"]
            os.kill(process.pid, signal.SIGCONT)
            assert await scheduler.conditions.get() == []

    asyncio.run(work())


def test_a_missing_folder_of_a_tier_is_named(run_dir: Path, daemon: Daemon) -> None:
    async def work() -> None:
        async with agent_of(run_dir, daemon, FakeLauncher()) as scheduler:
            nvme = daemon.config.nvme_dir
            os.rename(nvme, f"{nvme}.elsewhere")  # noqa: PTH104 - as a cleaner does it
            named = await condition(scheduler, "statemanager_unhealthy")
            assert nvme in named["message"]
            os.rename(f"{nvme}.elsewhere", nvme)  # noqa: PTH104
            assert await scheduler.conditions.get() == []

    asyncio.run(work())


def test_conditions_are_reported_when_they_change_and_to_a_new_scheduler() -> None:
    held = NodeConditions()
    one, other = ("part_stuck", "a"), ("part_stuck", "b")
    assert held.update([], 0.0) is None
    since_one = (Condition(code="part_stuck", message="a", since=1.0),)
    assert held.update([one], 1.0) == since_one
    assert held.update([one], 2.0) is None
    held.report_again()
    assert held.update([one], 3.0) == since_one
    found = held.update([other, one], 4.0)
    assert found is not None
    assert [each.since for each in found] == [4.0, 1.0]
    assert held.update([], 5.0) == ()
    held.report_again()
    assert held.update([], 6.0) is None
