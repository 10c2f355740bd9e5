"""The HRRS score against the paper's formula."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plexrl.scheduler.rules.hrrs import (
    WEIGHT_MAX,
    Candidate,
    guard_ends_at,
    response_ratio,
    urgency,
)

times = st.floats(0, 1e4)
candidates = st.builds(
    Candidate,
    name=st.text("abc", min_size=1, max_size=3),
    arrived_at=times,
    service_s=st.floats(0.01, 1e3),
    setup_s=st.floats(0, 100),
)


@given(candidates, times)
def test_the_ratio_is_waiting_plus_effective_service_over_effective_service(
    candidate: Candidate, later: float
) -> None:
    now = candidate.arrived_at + later
    service = candidate.service_s + candidate.setup_s
    waited = now - candidate.arrived_at
    assert response_ratio(candidate, now) == (waited + service) / service


@given(candidates, times, st.floats(0, 1e6))
def test_urgency_is_the_ratio_for_a_second_of_cycle_within_bounds(
    candidate: Candidate, later: float, cycle_s: float
) -> None:
    candidate = replace(candidate, cycle_s=cycle_s)
    now = candidate.arrived_at + later
    service = candidate.service_s + candidate.setup_s
    bounded = sorted((service, cycle_s, WEIGHT_MAX * service))[1]
    assert urgency(candidate, now) == response_ratio(candidate, now) / bounded


@given(candidates, candidates, st.floats(0, 1e6), st.floats(0, 1e6))
def test_every_waiting_candidate_is_served_in_the_end(
    waiting: Candidate, other: Candidate, its_cycle_s: float, other_cycle_s: float
) -> None:
    """A newcomer's urgency is bounded; that of a waiting candidate grows without bound."""
    long_after = waiting.arrived_at + 1e9
    newcomer = replace(other, name="new", arrived_at=long_after, setup_s=0.0, cycle_s=other_cycle_s)
    waiting = replace(waiting, cycle_s=its_cycle_s)
    assert urgency(waiting, long_after) > urgency(newcomer, long_after)


def test_the_setup_cost_keeps_the_resident_among_equals() -> None:
    resident = Candidate(name="r", arrived_at=0, service_s=10, setup_s=0)
    other = Candidate(name="o", arrived_at=0, service_s=10, setup_s=5)
    assert urgency(resident, 8) > urgency(other, 8)


def test_the_guard_ends_at_the_ratio_or_at_the_starvation_bound() -> None:
    waits = {"arrived_at": 10.0, "since": 12.0, "effective_s": 4.0}
    ends_at = guard_ends_at(**waits, ratio=3.0, bound_s=100.0)
    guest = Candidate(name="g", arrived_at=10.0, service_s=3.0, setup_s=1.0)
    assert response_ratio(guest, ends_at) == 3.0
    assert guard_ends_at(**waits, ratio=3.0, bound_s=5.0) == 17.0
