"""The search for a placement against every candidate and shift of small clusters."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.placement.choice.search import fitting
from plexrl.scheduler.placement.contention.colocation import own_rollout_groups
from plexrl.scheduler.placement.placement import join
from tests.examples import examples
from tests.scheduler.placement.choice.brute_force import BruteForce
from tests.scheduler.placement.choice.small_clusters import SmallCluster


def check_case(rng: random.Random) -> str:
    """Compare one search with brute force; returns the kind of what was found."""
    small = SmallCluster(rng)
    cluster, newcomer = small.context.cluster, small.newcomer()
    now = float(rng.randint(0, 100))
    beside = own_rollout_groups(cluster.capacity, newcomer)
    if rng.random() < 0.3:
        beside = []
    expected = BruteForce(cluster.state, cluster.settings.config, newcomer, beside).strict(now)
    found = fitting(cluster, newcomer, now, strict=True, beside=beside)
    costs = {(choice.group, *choice.beside): choice.cost for choice in found}
    assert costs == pytest.approx({each.groups: each.cost for each in expected})
    best = fitting(cluster, newcomer, now, strict=True, count=1, beside=beside)
    assert best == found[:1]
    if not best:
        return "none"
    assert best[0].cost == pytest.approx(expected[0].cost)
    gpus = len(cluster.state.groups[best[0].group].gpus)
    is_part = gpus > newcomer.spec.workers - sum(len(group.gpus) for group in beside)
    if not beside:
        join(cluster.capacity, newcomer, best[0], now)
        cluster.capacity.inventory.check()
    if best[0].beside:
        return "union" + (" beside its own" if beside else "")
    return ("part" if is_part else "whole") + (" beside its own" if beside else "")


@settings(max_examples=examples(200), deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_strict_placement_is_found_exactly_if_one_exists_and_at_the_least_cost(
    rng: random.Random,
) -> None:
    check_case(rng)
