"""Under a fair schedule, training goes on for every staleness bound and every set of strategies."""

from itertools import product

import pytest

from plexrl.rollout.coordinator.settings import (
    CoordinatorSettings,
    Migration,
    Routing,
    Synchronisation,
)
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import TrajectoryId
from tests.rollout.fleet import Fleet

MODEL = CostModel(k1=1e-3, k2=2e-2, k3=1e-2, k4=1e-1, k5=1.0)
ROUTINGS: tuple[Routing, ...] = ("throughput", "count")
SYNCHRONISATIONS: tuple[Synchronisation, ...] = ("throughput", "greedy")
MIGRATIONS: tuple[Migration, ...] = ("throughput", "none")


@pytest.mark.parametrize(
    ("staleness", "routing", "synchronisation", "migration"),
    list(product((0, 1, 3), ROUTINGS, SYNCHRONISATIONS, MIGRATIONS)),
)
def test_batches_are_trained_in_order_within_the_bound(
    staleness: int, routing: Routing, synchronisation: Synchronisation, migration: Migration
) -> None:
    settings = CoordinatorSettings(
        staleness=StalenessSettings(staleness=staleness, batch_groups=3, group_size=2),
        cost_model=MODEL,
        routing=routing,
        synchronisation=synchronisation,
        migration=migration,
    )
    fleet = Fleet(settings)
    fleet.lengths = {TrajectoryId(i): 1 + (i * 7) % 23 for i in range(1000)}
    for _ in range(3):
        fleet.join(budget=40)
    for _ in range(600):
        fleet.round()
        fleet.core.check_invariants()
        if len(fleet.trained) == 8:
            break
    assert [each.version for each in fleet.trained] == list(range(8))
    trained = [each.trajectory for train in fleet.trained for each in train.batch]
    assert len(trained) == len(set(trained)) == 8 * 3 * 2
    for train in fleet.trained:
        for each in train.batch:
            assert train.version - staleness <= each.version <= train.version
            tokens = sum(segment.tokens for segment in each.segments)
            assert tokens == fleet.lengths[each.trajectory]
