"""What a rollout service that is stopped leaves behind."""

import asyncio
from pathlib import Path

from plexrl.rollout.coordinator.messages import GroupAdded, InstanceJoined
from plexrl.rollout.service.config import FOLDER, SUFFIX
from plexrl.rollout.service.journal.state import RolloutState
from plexrl.rollout.service.journal.store import RolloutStore
from plexrl.rollout.service.server import RolloutService
from plexrl.rollout.trajectories.record import InstanceId, SampleGroupId
from tests.rollout.test_service_access import config
from tests.rollout.test_service_store import ORDER


def test_a_service_that_is_stopped_leaves_no_events_to_decide_again(tmp_path: Path) -> None:
    """So another version, which may decide in another way, goes on from the state."""
    path = tmp_path / FOLDER / ORDER.job / f"{ORDER.name}{SUFFIX}"
    store, state = RolloutStore(path), RolloutState.new(ORDER)
    store.begin(ORDER)
    for event in (
        InstanceJoined(instance=InstanceId("rollout-0"), version=0, kv_budget=64.0),
        GroupAdded(group=SampleGroupId(0), prompt_tokens=3),
    ):
        taken = state.take(event, store)
        assert taken is not None
        store.write([taken[0]])
    assert store.tail_events == 2
    store.close()

    async def serve() -> None:
        service = RolloutService(config(tmp_path))
        servers = await service.open()
        for each in servers:
            each.close()
        await service.close()

    asyncio.run(serve())
    store = RolloutStore(path)
    assert store.tail_events == 0
    assert RolloutState.stored(ORDER, store).plain() == state.plain()
    assert store.snapshot() == (2, state.plain())
    store.close()
