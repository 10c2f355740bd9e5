"""The ordering rule is the paper's formula, read literally."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl.scheduler.hrrs import Candidate, highest, response_ratio

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


@given(st.lists(candidates, min_size=1, unique_by=lambda c: c.name), times)
def test_nobody_has_a_higher_ratio_than_the_chosen_one(
    waiting: list[Candidate], now: float
) -> None:
    chosen = highest(waiting, now)
    assert chosen is not None
    best = max(response_ratio(candidate, now) for candidate in waiting)
    assert response_ratio(chosen, now) == best
    equals = [c for c in waiting if response_ratio(c, now) == best]
    assert (chosen.arrived_at, chosen.name) == min((c.arrived_at, c.name) for c in equals)


@given(candidates, candidates)
def test_whoever_waits_is_served_in_the_end(first: Candidate, other: Candidate) -> None:
    """A newcomer's ratio is 1, and a waiting one's grows past any bound."""
    long_after = first.arrived_at + 1e9
    newcomer = Candidate(name="new", arrived_at=long_after, service_s=other.service_s, setup_s=0.0)
    assert highest([newcomer, first], long_after) == first


def test_the_setup_cost_keeps_the_resident_among_equals() -> None:
    resident = Candidate(name="r", arrived_at=0, service_s=10, setup_s=0)
    other = Candidate(name="o", arrived_at=0, service_s=10, setup_s=5)
    assert highest([other, resident], 8) == resident
