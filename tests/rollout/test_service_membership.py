"""Instances whose weights cannot be set, and whose deployments end, on a scripted cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.data.results import Sample, SyncReport, WeightsSpan
from plexrl.errors import (
    ConflictError,
    ExecutionError,
    InvalidRequestError,
    PlexRLError,
    RolloutFailedError,
    UnavailableError,
    UnknownDeploymentError,
)
from plexrl.rollout.coordinator.messages import SwitchTp
from plexrl.rollout.service.cluster_calls import ClusterCalls, RowRequest
from plexrl.rollout.service.config import RolloutConfig
from plexrl.rollout.service.instances.driver import InstanceDriver
from plexrl.rollout.service.journal.store import RolloutStore
from plexrl.rollout.service.live_rollout import LiveRollout
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.service.status import status
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId, group_of
from plexrl.wire.operations import SamplingParams

ORDER = RolloutOrder(
    job="job",
    name="rollout",
    source="actor",
    instances=("rollout-0", "rollout-1"),
    staleness=0,
    prompts=4,
    samples=1,
    sampling=SamplingParams(seed=3, max_tokens=8),
)
ORDER_1 = InstanceId("rollout-1")
CONFIG = RolloutConfig(
    listen=("unix:/unused",),
    routers=("http://127.0.0.1:1",),
    data_dir="/unused",
    cycle_s=0.05,
    # Failed pulls are repeated every 0.25 s.
    instance_lost_s=1.0,
)


class ScriptedCluster(ClusterCalls):
    """Deployments that fail, end and stall as the test says. A sample has two tokens."""

    def __init__(self) -> None:
        super().__init__(AsyncTransport(CONFIG.routers, "key", 1.0, None), ORDER.job)
        self.trainer_step = 7
        """Of the weights that are pulled from now on."""
        self.switches: list[tuple[str, int, str]] = []
        self.failing_switches = 0
        """Of the next ones."""
        self.failing_pulls: dict[str, int] = {}
        """Pulls that are still to fail, by deployment."""
        self.pulls: list[str] = []
        self.acknowledged: list[str] = []
        self.cancelled: list[str] = []
        self.ended: set[str] = set()
        self.states: dict[str, str] = {}
        """States other than "ready"."""
        self.groups: dict[str, list[str]] = {}
        """Groups of deployments that share some."""
        self.job_states: list[PlexRLError] = []
        """Why the next questions for the job's state are not answered."""
        self.served = asyncio.Event()
        self.stalled: set[str] = set()
        """Deployments that generate nothing."""
        self.beginning: set[str] = set()
        """Those of them that do not show yet what they have got."""
        self.generated: dict[str, list[int]] = {}
        """Trajectories by operation."""
        self.where: dict[str, str] = {}
        self.resumed = asyncio.Event()

    async def pull(
        self, deployment: str, source: str, operation: str, *, published: bool = False
    ) -> SyncReport:
        assert source == "actor"
        # The first weights of an instance need not have been published.
        assert published is (".0" not in operation.rpartition("/")[2])
        assert operation not in self.pulls
        self.pulls.append(operation)
        await asyncio.sleep(0)
        if self.states.get(deployment):
            # The scheduler keeps the operation until the deployment serves.
            await self.served.wait()
        if deployment in self.ended:
            raise UnknownDeploymentError(f"there is no deployment {deployment}")
        if self.failing_pulls.get(deployment, 0):
            self.failing_pulls[deployment] -= 1
            raise ExecutionError("the disk is on fire")
        report = {"trainer_step": self.trainer_step, "pause_s": 0.25, "transfer_s": 2.0}
        return cast("SyncReport", report)

    async def pushed(self, operation: str) -> None:
        assert "/v" in operation

    async def acknowledge(self, operation: str) -> None:
        self.acknowledged.append(operation)

    async def deployment(self, name: str) -> Any:
        if name in self.ended:
            raise UnknownDeploymentError(f"there is no deployment {name}")
        groups = self.groups.get(name, [f"g-{name}"])
        return {"state": self.states.get(name, "ready"), "workers": 1, "groups": groups}

    async def engines(self, deployment: str) -> Any:
        rows = [
            [operation, row, 2, True]
            for operation, numbers in self.generated.items()
            if self.where[operation] == deployment and deployment in self.stalled - self.beginning
            for row in range(len(numbers))
        ]
        return [{"blocks": 100, "block_tokens": 16, "rows": rows, "steps": [], "preemptions": 0}]

    async def switch_tp(self, name: str, tp: int, kv: str) -> None:
        self.switches.append((name, tp, kv))
        if self.failing_switches:
            self.failing_switches -= 1
            raise ConflictError("the engine's weights are not on the device")

    async def job_state(self) -> str:
        if self.job_states:
            raise self.job_states.pop()
        return "RUNNING"

    async def cancel(self, operation: str) -> None:
        self.cancelled.append(operation)

    async def generate(
        self, deployment: str, rows: Sequence[RowRequest], sampling: SamplingParams, operation: str
    ) -> None:
        del sampling
        self.where[operation] = deployment
        self.generated[operation] = [each.number for each in rows]

    async def rows(self, operation: str) -> AsyncIterator[list[tuple[int, Sample]] | None]:
        if self.where[operation] in self.stalled:
            await self.resumed.wait()
        logprobs = np.zeros(2, dtype=np.float32)
        spans = (WeightsSpan(0, 0, self.trainer_step),)
        count = len(self.generated[operation])
        yield [(row, Sample([row, 1], logprobs, "stop", spans)) for row in range(count)]


@asynccontextmanager
async def running(
    path: Path, cluster: ScriptedCluster, order: RolloutOrder = ORDER
) -> AsyncIterator[LiveRollout]:
    store = RolloutStore(path / "rollout.sqlite")
    if store.order() is None:
        store.begin(order)
    rollout = LiveRollout(order, store, cluster, CONFIG)
    task = asyncio.create_task(rollout.run())
    try:
        yield rollout
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rollout.writer.settled()
        store.close()


async def reached(rollout: LiveRollout, what: Callable[[], bool]) -> None:
    await rollout.wait_for(what, 30.0)
    assert what()


def give_prompts(rollout: LiveRollout) -> None:
    first = rollout.progress.next_group
    for group in range(first, first + ORDER.prompts):
        assert rollout.add_prompt(group, np.array([3, group], dtype=np.int32))


async def make_first_batch(rollout: LiveRollout) -> None:
    """Generate and reward the first prompts; the trainer has made 7 steps."""
    give_prompts(rollout)
    rollout.request_batch(0, 7)
    await reached(rollout, lambda: len(rollout.progress.unrewarded) == ORDER.prompts)
    for each, event in list(rollout.progress.unrewarded.items()):
        rollout.reward(each, event + 1, 0.5, "")  # of another generation
        rollout.reward(each, event, 1.0, "")
    await reached(rollout, lambda: rollout.progress.batch is not None)


def test_the_status_names_the_prompt_whose_reward_is_missing(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path, ScriptedCluster()) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            shown = status(rollout)
            assert shown["oldest_unrewarded"] is None
            assert shown["waits_for"] == "it waits for prompts of the controller"
            give_prompts(rollout)
            rollout.request_batch(0, 7)
            await reached(rollout, lambda: len(rollout.progress.unrewarded) == ORDER.prompts)
            held, *others = list(rollout.progress.unrewarded.items())
            for each, event in others:
                rollout.reward(each, event, 1.0, "")
            shown = status(rollout)
            assert shown["unrewarded"] == 1
            oldest = shown["oldest_unrewarded"]
            assert oldest is not None
            assert oldest["prompt"] == group_of(held[0], 1)
            assert oldest["waiting_s"] >= 0
            prompt = group_of(held[0], 1)
            waits = f"1 sample waits for a reward of the controller, the oldest, of prompt {prompt}"
            assert shown["waits_for"].startswith(waits)
            rollout.reward(*held, 1.0, "")
            shown = status(rollout)
            assert shown["oldest_unrewarded"] is None
            assert "reward" not in shown["waits_for"]

    asyncio.run(check())


def test_a_failed_pull_is_acknowledged_and_tried_again(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.failing_pulls["rollout-1"] = 2
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            failed = [each for each in cluster.pulls if "rollout-1" in each][:2]
            assert cluster.acknowledged == failed
            assert rollout.is_joined
            assert rollout.steps == {0: 7}

    asyncio.run(check())


def test_it_is_known_which_instance_has_gpus_of_the_trainer(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.groups = {"actor": ["g0", "g1"], "rollout-1": ["g1"]}
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            joined = rollout.core.assignments.instances
            assert {name: each.is_with_trainer for name, each in joined.items()} == {
                "rollout-0": False,
                "rollout-1": True,
            }
            # The trainer moves.
            cluster.groups["actor"] = ["g0", "g-rollout-0"]
            await reached(rollout, lambda: joined[InstanceId("rollout-0")].is_with_trainer)
            await reached(rollout, lambda: not joined[InstanceId("rollout-1")].is_with_trainer)

    asyncio.run(check())


def test_without_an_instance_the_rollout_fails_with_all_causes(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.failing_pulls["rollout-0"] = 100
        cluster.ended.add("rollout-1")
        async with running(tmp_path, cluster) as rollout:
            with pytest.raises(RolloutFailedError, match="no instance left") as caught:
                await rollout.wait_for(lambda: False, 30.0)
            assert "rollout-0: its weights could not be set: the disk is on fire" in str(
                caught.value
            )
            assert "rollout-1" in str(caught.value)

    asyncio.run(check())


def test_the_work_of_a_removed_instance_goes_to_the_others(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.stalled = {"rollout-0", "rollout-1"}
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            give_prompts(rollout)
            held: dict[str, dict[TrajectoryId, int]] = {
                name: work.held for name, work in rollout.instances.work.items()
            }
            await reached(rollout, lambda: sum(map(len, held.values())) == ORDER.prompts)
            lost = set(held[ORDER.instances[0]])
            assert lost
            cluster.ended.add("rollout-0")
            await reached(rollout, lambda: lost <= set(held[ORDER_1]))
            assert list(rollout.instances.work) == ["rollout-1"]
            absence = rollout.members[0].absence
            assert absence is not None
            assert "ended" in absence.reason or "no deployment" in absence.reason
        stuck = [each for each, name in cluster.where.items() if name == "rollout-0"]
        assert cluster.cancelled == stuck

    asyncio.run(check())


def test_what_an_engine_is_about_to_begin_runs_and_waits_while_it_is_offloaded(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.beginning = cluster.stalled = {"rollout-0", "rollout-1"}
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            give_prompts(rollout)
            held = rollout.instances.work[ORDER_1].held
            await reached(rollout, lambda: bool(held))
            driver = InstanceDriver(ORDER_1, rollout)
            load, _ = driver.load(await cluster.engines("rollout-1"))
            assert (set(load.running), load.waiting) == (set(held), ())
            load, _ = driver.load([])
            assert (load.running, set(load.waiting)) == ((), set(held))

    asyncio.run(check())


def test_rows_are_routed_by_steps_of_the_smallest_groups_and_shown_with_their_group(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.stalled = {"rollout-0", "rollout-1"}
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            give_prompts(rollout)
            held = rollout.instances.work[ORDER_1].held
            await reached(rollout, lambda: bool(held))
            driver = rollout._drivers[ORDER_1]
            await reached(rollout, lambda: bool(driver.operations()))
            (operation,) = driver.operations()
            (engine,) = await cluster.engines("rollout-1")
            engine["rows"] = [[operation, row, 2, True] for row in range(len(held))]
            steps = [[1, 3, 30.0, 0.1, 1, 0.0], [2, 3, 33.0, 0.2, 2, 0.0]]
            groups = [1] * len(held)
            engine |= {"tp": 2, "tp_sizes": [1, 2], "steps": steps, "groups": groups}
            load, measured = driver.load([engine])
            assert (load.tp, load.groups) == (2, (1,) * len(load.running))
            assert [each.seconds for each in measured] == [0.1]
            # All steps of an engine count whose groups do not change.
            other, _ = driver.load([engine | {"tp_sizes": [], "steps": []}])
            assert other.running == load.running
            later = [[number + 2, *step] for number, *step in steps]
            _, measured = driver.load([engine | {"tp_sizes": [], "steps": later}])
            assert [each.seconds for each in measured] == [0.1, 0.2]

    asyncio.run(check())


def test_an_engine_that_cannot_switch_goes_on_as_it_is(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.stalled = {"rollout-0", "rollout-1"}
        cluster.failing_switches = 1
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            for wanted in (0, 1):
                rollout.core.assignments.expected.switch_issued(ORDER_1)
                command = SwitchTp(instance=ORDER_1, tp=2, kv="migrate", gain_s=1.0)
                rollout.instances.work[ORDER_1].add(command)
                rollout._drivers[ORDER_1].add(command)
                await reached(rollout, lambda: not is_switching(rollout))
                assert rollout.progress.tp_switches == wanted
                assert not rollout.instances.work[ORDER_1].unanswered
            assert cluster.switches == [("rollout-1", 2, "migrate")] * 2

    asyncio.run(check())


def is_switching(rollout: LiveRollout) -> bool:
    return rollout.core.assignments.instances[ORDER_1].is_switching


def test_an_instance_out_of_service_is_lost_and_joins_again(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.stalled = {"rollout-0", "rollout-1"}
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            give_prompts(rollout)
            held = rollout.instances.work[ORDER_1].held
            await reached(rollout, lambda: bool(held))
            cluster.states["rollout-1"] = "waiting"
            await reached(rollout, lambda: list(rollout.instances.work) == ["rollout-0"])
            absence = rollout.members[1].absence
            assert absence is not None
            assert absence.reason == "it has been waiting for 1 s"
            # It is expected back, so the rollout does not fail with it.
            assert not absence.has_failed
            assert "rollout-1:1" not in rollout.instances.work
            cluster.states.clear()
            cluster.served.set()
            await reached(rollout, lambda: "rollout-1:1" in rollout.instances.work)
            assert rollout.members[1].absence is None

    asyncio.run(check())


def test_an_instance_that_comes_back_has_a_new_id_also_after_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            await rollout.pull_failed(ORDER_1, "job:rollout/prollout-1.1", ExecutionError("lost"))
            await reached(rollout, lambda: "rollout-1:1" in rollout.instances.work)
        async with running(tmp_path, cluster) as again:
            assert list(again.instances.work) == ["rollout-0", "rollout-1:1"]
            assert again.is_joined
            await make_first_batch(again)

    asyncio.run(check())


def test_a_rollout_that_lost_its_store_gets_no_results_of_the_former_one(tmp_path: Path) -> None:
    ids = []
    for name in ("former", "new"):
        (tmp_path / name).mkdir()
        store = RolloutStore(tmp_path / name / "rollout.sqlite")
        store.begin(ORDER)
        found = store.operation(ORDER, "grollout-0.1")
        store.close()
        store = RolloutStore(tmp_path / name / "rollout.sqlite")
        assert store.operation(ORDER, "grollout-0.1") == found
        store.close()
        ids.append(found)
    assert ids[0] != ids[1]


def test_a_cluster_that_does_not_tell_the_jobs_state_fails_no_rollout(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        cluster.job_states = [UnavailableError("the scheduler is away")]
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            assert not cluster.job_states
            rollout.check()

    asyncio.run(check())


def test_a_batch_is_refused_before_the_first_weights_and_without_a_step(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        async with running(tmp_path, cluster) as rollout:
            with pytest.raises(ConflictError, match="no instance"):
                rollout.check_batch(0, 7)
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            await make_first_batch(rollout)
            with pytest.raises(InvalidRequestError, match="make an optimizer step"):
                rollout.check_batch(1, 7)
            assert rollout.steps == {0: 7}

    asyncio.run(check())


def test_weights_between_two_versions_count_as_the_older_one(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path, ScriptedCluster()) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            rollout.steps |= {1: 9, 2: 12}
            assert [await rollout.version_of(step) for step in (7, 8, 9, 11, 12)] == [0, 0, 1, 1, 2]

    asyncio.run(check())


def test_a_pull_of_other_weights_than_the_published_ones_fails_the_rollout(tmp_path: Path) -> None:
    async def check() -> None:
        cluster = ScriptedCluster()
        async with running(tmp_path, cluster) as rollout:
            await reached(rollout, lambda: len(rollout.instances.work) == 2)
            await make_first_batch(rollout)
            # The cluster goes on giving weights of step 7.
            rollout.request_batch(1, 8)
            give_prompts(rollout)
            with pytest.raises(RolloutFailedError, match="set to other weights"):
                await rollout.wait_for(lambda: False, 30.0)

    asyncio.run(check())
