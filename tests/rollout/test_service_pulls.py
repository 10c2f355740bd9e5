"""An instance generates until the version that it is to pull has arrived at its node."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from plexrl.errors import PlexRLError, UnavailableError
from plexrl.rollout.coordinator.messages import Interrupt, Pull, RolloutEvent
from plexrl.rollout.service.instances.driver import InstanceDriver, Surroundings
from plexrl.rollout.service.instances.work import Instances, InstanceWork
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId

INSTANCE = InstanceId("rollout-0")
OPERATION = "prollout-0.1"
STOP = Interrupt(instance=INSTANCE, trajectories=(TrajectoryId(3),))
PULL = Pull(instance=INSTANCE, version=1)
REPORT = {"trainer_step": 7, "pause_s": 0.25, "transfer_s": 2.0}


class Rollout:
    """What the driver asks and tells, in order. The trajectory that it stops has just ended."""

    def __init__(self, fails: PlexRLError | None = None) -> None:
        self.log: asyncio.Queue[str] = asyncio.Queue()
        self.has_come = asyncio.Event()
        self.fails = fails
        self.order = SimpleNamespace(source="actor")
        self.store = SimpleNamespace(operation=lambda _, name: name)
        self.calls = self
        self.instances = Instances()
        self.instances.work[INSTANCE] = InstanceWork(version=0, kv_budget=100.0)

    async def pushed(self, operation: str) -> None:
        assert operation == "v1"

    async def begin_pull(self, name: str, source: str, operation: str, *, published: bool) -> None:
        assert (name, source, operation, published) == (INSTANCE, "actor", OPERATION, True)
        self.log.put_nowait("begin")
        if self.fails is not None:
            raise self.fails

    async def arrived(self, name: str, operation: str) -> None:
        assert (name, operation) == (INSTANCE, OPERATION)
        await self.has_come.wait()
        self.log.put_nowait("arrived")

    async def pull(self, *place: str, published: bool) -> dict[str, float]:
        assert (*place, published) == (INSTANCE, "actor", OPERATION, True)
        self.log.put_nowait("pull")
        return REPORT

    async def version_of(self, trainer_step: int) -> int:
        assert trainer_step == 7
        return 1

    def pulled(self, name: str, report: dict[str, float]) -> None:
        assert (name, report) == (INSTANCE, REPORT)

    def handle(self, event: RolloutEvent, *, parts: object = ()) -> None:
        del parts
        self.log.put_nowait(type(event).__name__)

    def driver(self) -> InstanceDriver:
        return InstanceDriver(INSTANCE, cast("Surroundings", self))


async def told(rollout: Rollout, count: int) -> list[str]:
    """The next entries of its log."""
    async with asyncio.timeout(30):
        return [await rollout.log.get() for _ in range(count)]


def test_a_stop_before_a_pull_waits_until_the_version_has_arrived() -> None:
    async def check() -> None:
        rollout = Rollout()
        driver = rollout.driver()
        driver.add(STOP)
        driver.add(PULL)
        running = asyncio.create_task(driver.run())
        assert await told(rollout, 1) == ["begin"]
        for _ in range(20):
            await asyncio.sleep(0)
        assert rollout.log.empty()
        rollout.has_come.set()
        assert await told(rollout, 4) == ["arrived", "Stopped", "pull", "Pulled"]
        running.cancel()

    asyncio.run(check())


@pytest.mark.parametrize("commands", [(STOP,), (STOP, STOP)])
def test_any_other_stop_waits_for_nothing(commands: tuple[Interrupt, ...]) -> None:
    async def check() -> None:
        rollout = Rollout()
        driver = rollout.driver()
        for each in commands:
            driver.add(each)
        running = asyncio.create_task(driver.run())
        assert await told(rollout, len(commands)) == ["Stopped"] * len(commands)
        running.cancel()

    asyncio.run(check())


def test_a_version_that_cannot_be_fetched_ahead_is_pulled_after_the_stop() -> None:
    async def check() -> None:
        rollout = Rollout(UnavailableError("its source is gone", retry_after_s=1.0))
        driver = rollout.driver()
        driver.add(STOP)
        driver.add(PULL)
        running = asyncio.create_task(driver.run())
        assert await told(rollout, 4) == ["begin", "Stopped", "pull", "Pulled"]
        running.cancel()

    asyncio.run(check())
