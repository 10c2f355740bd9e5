"""A batch that is too large for one message reaches its controller, through a real router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest

import plexrl
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch, _Feeder
from plexrl.rewards.scheduler import Graded
from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    Generated,
    GroupAdded,
    InstanceJoined,
    Rewarded,
    RolloutEvent,
    Route,
    SnapshotTaken,
)
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.service.config import FOLDER, SUFFIX, RolloutConfig
from plexrl.rollout.service.journal.state import RolloutState
from plexrl.rollout.service.journal.store import GeneratedPart, JournalEntry, RolloutStore
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.service.server import RolloutService
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    TrajectorySegment,
)
from plexrl.wire.framing import HEADER_BYTES_MAX
from plexrl.wire.tensors import Array
from tests.router.live_router import OPERATOR_KEY, live_router

PROMPT = np.array([7, 8, 9], dtype=np.int32)
INSTANCE = InstanceId("rollout-0")


PROMPTS, SAMPLES, TOKENS = 64, 16, 9_000
ORDER: dict[str, Any] = {
    "name": "rollout",
    "source": "actor",
    "instances": [INSTANCE],
    "staleness": 0,
    "prompts": PROMPTS,
    "samples": SAMPLES,
    "sampling": {"seed": 1},
    "first_batch": 0,
    "failed_prompts_max": 0,
}


def tokens_of(trajectory: int) -> Array:
    return (np.arange(TOKENS, dtype=np.int32) + trajectory) % 50_000


def fill(path: Path, order: RolloutOrder) -> None:
    """Store a rollout whose first batch was handed to the trainer."""
    store, state = RolloutStore(path), RolloutState.new(order)
    store.begin(order)
    entries: list[JournalEntry] = []

    def take(event: RolloutEvent, **more: Any) -> list[TrajectoryId]:
        found = state.take(event, store, **more)
        assert found is not None
        entries.append(found[0])
        return [each for c in found[1] if isinstance(c, Route) for each in c.trajectories]

    take(InstanceJoined(instance=INSTANCE, version=0, kv_budget=1e12), step=(0, 0))
    for group in range(PROMPTS):
        added = GroupAdded(group=SampleGroupId(group), prompt_tokens=len(PROMPT))
        take(added, prompt=(SampleGroupId(group), PROMPT))
    segments = (TrajectorySegment(tokens=TOKENS, policy_version=0, kv_version=0),)
    completed = 0
    while completed < PROMPTS * SAMPLES:
        shown = InstanceSnapshot(instance=INSTANCE, version=0, kv_cache=0.0, completed=completed)
        routed = take(SnapshotTaken(instances=(shown,)))
        assert routed
        for each in routed:
            row = tokens_of(each)
            part = GeneratedPart(each, row, -row.astype(np.float32), "stop")
            take(Generated(trajectory=each, instance=INSTANCE, segments=segments), parts=[part])
            take(Rewarded(trajectory=each, reward=each / 2))
        completed += len(routed)
    take(BatchRequested())
    store.write(entries)
    store.close()


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[None]:
    """The service, without running the rollouts: this cluster has no instances."""
    (folder / "operator.key").write_text(OPERATOR_KEY)
    config = RolloutConfig(
        listen=(f"unix:{folder}/rollout.sock",),
        routers=("http://127.0.0.1:1",),
        data_dir=str(folder),
    )
    service = RolloutService(config)
    servers = await service.open()
    try:
        yield
    finally:
        for each in servers:
            each.close()
        await service.close()


def taken(cluster: plexrl.Cluster, job: str) -> RolloutBatch:
    transport = cluster._transport
    actor = plexrl.TrainDeployment(transport, f"{job}/actor")
    rollout = BoundedRollout(transport, job, ORDER, actor)
    return rollout._batch(
        0, 0, _Feeder(rollout, iter(()), Graded(lambda _, __: None, on_failure="raise"), 0)
    )


@pytest.mark.slow
def test_a_batch_larger_than_a_message_arrives_whole() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir="/tmp")))
        router = stack.enter_context(live_router(rollout=f"unix:{folder}/rollout.sock"))
        cluster = stack.enter_context(plexrl.connect(router.url, OPERATOR_KEY))
        job = cluster.create_job("pages").job
        path = folder / FOLDER / job / f"rollout{SUFFIX}"
        order = msgspec.convert({**ORDER, "job": job}, RolloutOrder)
        fill(path, order)
        assert path.stat().st_size > HEADER_BYTES_MAX

        async def take() -> RolloutBatch:
            async with served(folder):
                return await asyncio.to_thread(taken, cluster, job)

        batch = asyncio.run(take())
    assert batch.prompts == [PROMPT.tolist()] * PROMPTS
    assert batch.prompt_numbers == list(range(PROMPTS))
    for group, row in enumerate(batch.samples):
        for index, sample in enumerate(row):
            trajectory = group * SAMPLES + index
            assert sample.tokens == tokens_of(trajectory).tolist()
            assert np.array_equal(sample.logprobs, -tokens_of(trajectory).astype(np.float32))
            assert batch.rewards[group][index] == trajectory / 2
