"""Predicted contention: properties, and agreement with an independent slow simulation."""

import math
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from random import Random

import pytest

from plexrl.scheduler.placement.contention.contention import (
    Contention,
    ContentionConfig,
    Resident,
    predict,
)
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment

SHARED_DRAW = 0.5
SLACK_RULE = ContentionConfig(guards_slack=True)


def resident(
    busy_s: float = 20.0,
    period_s: float = 100.0,
    jitter_s: float = 0.0,
    switch_s: float = 4.0,
    slack_s: float = 0.0,
) -> Resident:
    trace = DemandTrace(
        period_s=period_s,
        segments=(Segment(offset_s=0.0, duration_s=busy_s, slack_s=slack_s),),
        jitter_s=jitter_s,
    )
    return Resident(trace=trace, load_s=switch_s / 2, offload_s=switch_s / 2)


def test_a_resident_alone_waits_for_nothing() -> None:
    assert predict([resident(busy_s=100.0, jitter_s=50.0)]) == Contention(members=(0.0,), group=0.0)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_residents_that_fit_settle_without_waiting(count: int) -> None:
    found = predict([resident()] * count)
    assert found.group == pytest.approx(0.0, abs=1e-9)


def test_two_harmonic_residents_that_fit_wait_for_nothing() -> None:
    found = predict([resident(), resident(busy_s=10.0, period_s=50.0, switch_s=2.0)])
    assert max(found.members) == pytest.approx(0.0, abs=1e-9)


def test_without_anticipation_every_cycle_waits_for_its_switch() -> None:
    found = predict([resident()] * 2, ContentionConfig(anticipates=False))
    assert found.group == pytest.approx(4.0 / 104.0)


@pytest.mark.parametrize("count", [5, 6, 8])
@pytest.mark.parametrize("switch_s", [0.0, 4.0])
def test_beyond_saturation_waiting_is_that_of_a_saturated_server(
    count: int, switch_s: float
) -> None:
    """N bursts and N switches make the cycle: C = N (D + s), of which C - P is waiting."""
    cycle_s = count * (20.0 + switch_s)
    found = predict([resident(switch_s=switch_s)] * count)
    assert found.group == pytest.approx((cycle_s - 100.0) / cycle_s, abs=1e-6)
    if cycle_s < 110.0:
        return
    varied = predict([resident(switch_s=switch_s, jitter_s=5.0)] * count)
    # Cycles that vary leave the server without work now and then, the less the more there are.
    assert varied.group == pytest.approx((cycle_s - 100.0) / cycle_s, abs=0.04)


@pytest.mark.parametrize("jitter_s", [0.0, 10.0])
@pytest.mark.parametrize("count", [3, 4, 6])
def test_waiting_grows_with_the_cost_of_a_switch(count: int, jitter_s: float) -> None:
    switches_s = (0.0, 4.0, 8.0, 16.0, 32.0)
    parts = [
        predict([resident(jitter_s=jitter_s, switch_s=s)] * count, bursts=4000).group
        for s in switches_s
    ]
    assert all(lower <= higher + 0.002 for lower, higher in pairwise(parts))
    assert parts[-1] > parts[0] or (count == 3 and jitter_s == 0.0)


def test_waiting_grows_with_every_resident() -> None:
    parts = [predict([resident(jitter_s=15.0)] * count).group for count in range(1, 9)]
    assert all(lower < higher for lower, higher in pairwise(parts))


def test_the_order_of_residents_makes_no_difference() -> None:
    named = [
        resident(jitter_s=10.0),
        resident(busy_s=35.0, period_s=120.0, jitter_s=5.0),
        resident(busy_s=11.0, slack_s=11.0),
        resident(jitter_s=10.0),
    ]
    expected = dict(zip(named, predict(named, SLACK_RULE).members, strict=True))
    for order in permutations(named):
        found = predict(order, SLACK_RULE)
        assert dict(zip(order, found.members, strict=True)) == expected


def test_equal_residents_wait_equally() -> None:
    found = predict([resident(jitter_s=20.0)] * 3)
    assert len(set(found.members)) == 1
    assert found.group == pytest.approx(max(found.members))


def test_delay_within_a_segments_slack_costs_the_cycle_nothing() -> None:
    def pair(slack_s: float) -> Contention:
        segment = Segment(offset_s=0.0, duration_s=20.0, slack_s=slack_s)
        trace = DemandTrace(period_s=90.0, segments=(segment,), jitter_s=9.0)
        return predict([Resident(trace=trace), resident(busy_s=70.0, jitter_s=9.0)])

    assert pair(60.0).members[0] > pair(0.0).members[0]
    assert pair(60.0).members[1] < 0.5


def test_segments_nearer_than_a_switch_are_one_burst() -> None:
    parts = (
        Segment(offset_s=0.0, duration_s=8.0),
        Segment(offset_s=9.0, duration_s=11.0),
    )
    cut = Resident(
        trace=DemandTrace(period_s=100.0, segments=parts, jitter_s=10.0), load_s=2.0, offload_s=2.0
    )
    # The gap counts as variable as the burst, so the two are near, not the same.
    whole = resident(jitter_s=10.0)
    assert predict([cut] * 4).group == pytest.approx(predict([whole] * 4).group, abs=0.01)


def test_members_with_disjoint_plans_wait_as_without_the_guard() -> None:
    residents = [resident()] * 3
    assert predict(residents, SLACK_RULE) == predict(residents)


def test_members_with_unreliable_periods_are_all_guests() -> None:
    """No member has exclusive slots, so none is held back."""
    residents = [resident(jitter_s=15.0, busy_s=30.0)] * 4
    assert predict(residents, SLACK_RULE) == predict(residents)


def test_guests_keep_out_of_exclusive_slots() -> None:
    """Near saturation some plans always overlap, so holding guests back loses time for all."""
    residents = [resident(busy_s=30.0, period_s=120.0)] * 2 + [
        resident(busy_s=60.0, period_s=120.0)
    ]
    assert predict(residents, SLACK_RULE).group > predict(residents).group + 0.01


def test_a_starving_member_goes_first() -> None:
    """Short bursts pass a long one until it has waited for the bound."""
    residents = [resident(busy_s=100.0, period_s=1000.0)]
    residents += [resident(busy_s=10.0, period_s=40.0, jitter_s=4.0)] * 5
    patient, starving = (
        predict(residents, ContentionConfig(starvation_bound_s=bound_s)) for bound_s in (1e9, 100.0)
    )
    assert starving.members[0] < patient.members[0]


def test_a_starving_guest_is_no_longer_held_back() -> None:
    residents = [resident(busy_s=30.0, period_s=120.0)] * 2 + [
        resident(busy_s=60.0, period_s=120.0)
    ]
    for rule in (
        ContentionConfig(guards_slack=True, starvation_ratio=1.0),
        ContentionConfig(guards_slack=True, starvation_bound_s=0.0),
    ):
        assert predict(residents, rule) == predict(residents)


CASES = [
    ([resident(jitter_s=15.0)] * 2, ContentionConfig()),
    ([resident(jitter_s=15.0)] * 3, ContentionConfig(anticipates=False)),
    ([resident(jitter_s=15.0)] * 4, ContentionConfig()),
    ([resident(jitter_s=15.0, busy_s=30.0)] * 4, ContentionConfig()),
    (
        [resident(jitter_s=10.0), resident(busy_s=25.0, period_s=140.0, jitter_s=20.0)],
        ContentionConfig(),
    ),
    (
        [
            resident(jitter_s=15.0),
            resident(busy_s=30.0, period_s=150.0, jitter_s=20.0, switch_s=10.0),
            resident(busy_s=20.0, period_s=210.0, jitter_s=10.0),
        ],
        ContentionConfig(),
    ),
]


@pytest.mark.parametrize(("residents", "rule"), CASES)
def test_the_prediction_agrees_with_a_slow_simulation(
    residents: list[Resident], rule: ContentionConfig
) -> None:
    found, expected = predict(residents, rule).group, slow_simulation(residents, rule)
    assert found == pytest.approx(expected, rel=0.10, abs=0.01)


# The oracle: the same group in steps of a fixed time, with real draws.

STEP_S = 0.25


@dataclass
class SlowMember:
    resident: Resident
    asks_at: float
    burst_s: float
    left_s: float = 0.0
    last_end: float = 0.0
    pauses: list[float] = field(default_factory=list)
    waited_s: float = 0.0

    @property
    def usual_s(self) -> float:
        weights = [0.7**age for age in range(len(self.pauses))]
        newest_first = zip(weights, reversed(self.pauses), strict=True)
        return sum(w * p for w, p in newest_first) / sum(weights)


def slow_simulation(
    residents: list[Resident], rule: ContentionConfig, until_s: float = 60_000.0
) -> float:
    random = Random(7)
    members = []
    for number, each in enumerate(residents):
        pause_s, burst_s = draw(each, random)
        members.append(SlowMember(each, number * 10.0, burst_s, pauses=[pause_s]))
    holder = members[0]
    doing, until, coming = "idle", 0.0, members[0]
    for step in range(int(until_s / STEP_S)):
        now = step * STEP_S
        asking = [member for member in members if member.asks_at <= now]
        for member in asking:
            if not (doing == "burst" and member is holder):
                member.waited_s += STEP_S
        if now < until:
            continue
        if doing == "burst":
            pause_s, next_s = draw(holder.resident, random)
            holder.last_end, holder.asks_at, holder.burst_s = now, now + pause_s, next_s
            holder.pauses = [*holder.pauses[-20:], pause_s]
            doing = "ended"
            asking = [member for member in asking if member is not holder]
        elif doing == "offload":
            if coming not in asking and asking:
                coming = most_urgent(asking, holder, now)
            holder, doing, until = coming, "load", now + coming.resident.load_s
            continue
        if asking and (holder not in asking or doing == "ended"):
            coming = most_urgent(asking, holder, now)
        elif asking:
            coming = holder
        elif rule.anticipates:
            coming = min(members, key=lambda member: member.last_end + member.usual_s)
        if coming is not holder and (asking or rule.anticipates):
            doing, until = "offload", now + holder.resident.offload_s
        elif holder in asking:
            doing, until = "burst", now + holder.burst_s
        else:
            doing = "idle"
    return math.fsum(member.waited_s for member in members) / (until_s * len(members))


def most_urgent(asking: list[SlowMember], holder: SlowMember, now: float) -> SlowMember:
    def urgency(member: SlowMember) -> float:
        switch_s = 0.0
        if member is not holder:
            switch_s = holder.resident.offload_s + member.resident.load_s
        work_s = member.burst_s + switch_s
        cycle_s = member.asks_at - member.last_end + member.burst_s
        ratio = 1.0 + (now - member.asks_at) / work_s
        return ratio / min(max(cycle_s, work_s), 8.0 * work_s)

    return max(asking, key=urgency)


def draw(resident: Resident, random: Random) -> tuple[float, float]:
    """(pause, burst) of a random cycle with the variation of the trace."""
    trace = resident.trace
    idle_s = trace.period_s - trace.busy_s
    both = trace.busy_s**2 + idle_s**2 + 2 * SHARED_DRAW * trace.busy_s * idle_s
    sigma = trace.jitter_s / math.sqrt(both)
    common, own = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)
    mixed = SHARED_DRAW * common + math.sqrt(1 - SHARED_DRAW**2) * own
    return (
        idle_s * math.exp(sigma * mixed - sigma**2 / 2),
        trace.busy_s * math.exp(sigma * common - sigma**2 / 2),
    )
