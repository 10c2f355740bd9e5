"""Asynchronous rollouts, for `async` controllers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing

from plexrl.client.asynchronous.from_blocking import in_thread
from plexrl.client.blocking.bounded_rollout import (
    REWARD_TIMEOUT_S,
    BoundedRollout,
    PartSize,
    RewardFunction,
    RolloutBatch,
)
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
        reward_timeout_s: float | None = REWARD_TIMEOUT_S,
    ) -> AsyncIterator[RolloutBatch]:
        """As `BoundedRollout.batches`. `prompts` and `reward`, plain functions, are used in a
        thread; `steps` and `reward_timeout_s` are as there. Close it (`aclosing`) if the loop may
        end early."""
        async with aclosing(self._started(prompts, reward, steps, reward_timeout_s)) as found:
            async for batch in found:
                yield batch

    async def parts(
        self,
        prompts: Iterable[Sequence[int]],
        reward: RewardFunction | Graded[Sample],
        *,
        steps: int,
        tokens_min: int = 0,
        prompts_min: int = 1,
        reward_timeout_s: float | None = REWARD_TIMEOUT_S,
    ) -> AsyncIterator[RolloutBatch]:
        """As `BoundedRollout.parts`; `prompts` and `reward` are used as in `batches`, `steps`,
        `tokens_min`, `prompts_min` and `reward_timeout_s` are as there. Close it (`aclosing`) if
        the loop may end early."""
        size = PartSize(tokens_min, prompts_min)
        async with aclosing(self._started(prompts, reward, steps, reward_timeout_s, size)) as found:
            async for part in found:
                yield part

    async def _started(
        self,
        prompts: Iterable[Sequence[int]],
        reward: RewardFunction | Graded[Sample],
        steps: int,
        reward_timeout_s: float | None,
        size: PartSize | None = None,
    ) -> AsyncGenerator[RolloutBatch]:
        found = self._sync._started(prompts, reward, steps, reward_timeout_s, size)
        try:
            while (batch := await asyncio.to_thread(next, found, None)) is not None:
                yield batch
        finally:
            await asyncio.to_thread(found.close)
