"""Asynchronous rollouts, for `async` controllers."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from plexrl.client.asynchronous.from_blocking import in_thread
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RewardFunction, RolloutBatch
from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.data.results import Sample
from plexrl.rewards.scheduler import Graded


class AsyncBoundedRollout:
    """Like `BoundedRollout`, for `async` controllers."""

    def __init__(self, transport: AsyncTransport, rollout: BoundedRollout) -> None:
        self._transport = transport
        self._sync = rollout

    def __repr__(self) -> str:
        return repr(self._sync).replace("<Bounded", "<AsyncBounded", 1)

    @property
    def name(self) -> str:
        """As `BoundedRollout.name`."""
        return self._sync.name

    status = in_thread(BoundedRollout.status)

    async def batches(
        self,
        prompts: Iterable[Sequence[int]],
        reward: RewardFunction | Graded[Sample],
        *,
        steps: int,
    ) -> AsyncIterator[RolloutBatch]:
        """As `BoundedRollout.batches`. `prompts` and `reward`, plain functions, are used in a
        thread; `steps` is as there. Close it (`aclosing`) if the loop may end early."""
        found = self._sync._started(prompts, reward, steps)
        try:
            while (batch := await asyncio.to_thread(next, found, None)) is not None:
                yield batch
        finally:
            await asyncio.to_thread(found.close)
