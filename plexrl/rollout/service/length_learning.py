"""Fits the ranker of response lengths to what was generated, after each batch (StreamRL §5.2).

What the ranker learns from is stored with the event that ends a prompt, so a restart has the same
ranker. What it predicted is part of the event that adds a prompt.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.policies.length_ranker import LengthRanker, fit
from plexrl.rollout.service.journal.store import RolloutStore
from plexrl.rollout.service.order import RolloutOrder


class Learning(Protocol):
    """The rollout whose lengths are learned."""

    order: RolloutOrder
    store: RolloutStore
    core: RolloutCoordinator
    ranker: LengthRanker | None

    async def wait_for(self, is_done: Callable[[], bool], wait_s: float | None) -> None:
        """Wait until `is_done()`, or `wait_s` seconds are over."""
        ...

    async def settled(self) -> None:
        """Wait until what was decided before is durable."""
        ...


async def learn_lengths(rollout: Learning) -> None:
    """Runs until cancelled; only if the order wants it."""
    known = -1

    def is_due() -> bool:
        return rollout.order.length_aware and rollout.core.newest_version != known

    while True:
        await rollout.wait_for(is_due, None)
        known = rollout.core.newest_version
        await rollout.settled()
        examples = await asyncio.to_thread(rollout.store.examples)
        rollout.ranker = await asyncio.to_thread(fit, examples)
