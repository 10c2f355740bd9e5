"""Which of the members that want a group goes first, by the ordering rule."""

from collections.abc import Sequence

from plexrl.ids import DeploymentId
from plexrl.scheduler.dispatch.candidates.readiness import candidate
from plexrl.scheduler.rules.ordering import SortKey, first, sort_key
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.records import Deployment


def first_of(situation: Situation, waiting: Sequence[Deployment], now: float) -> Deployment:
    """The first of `waiting`, which is not empty."""
    if len(waiting) == 1:
        return waiting[0]
    state, settings = situation.state, situation.settings
    candidates = [candidate(state, member) for member in waiting]
    best = first(settings.ordering, candidates, now, settings.config.starvation_bound_s)
    assert best is not None, "no candidate is first"
    return state.deployments[DeploymentId(best.name)]


def stays_first(
    situation: Situation, holder: Deployment, waiting: Sequence[Deployment], now: float
) -> bool:
    """Whether a holder that would go on, but whose burst has reached its bound, goes first again.

    By HRRS it does so for its class or its tenant's share only. Its response ratio is that of its
    next operations, and says nothing of the whole bound that they would have again.
    """
    settings = situation.settings
    if not settings.ordering.shares_fairly or not settings.config.burst_interruptions:
        return first_of(situation, [holder, *waiting], now) is holder
    rival = first_of(situation, waiting, now)
    return _key(situation, holder, now)[:3] < _key(situation, rival, now)[:3]


def _key(situation: Situation, member: Deployment, now: float) -> SortKey:
    settings, asked = situation.settings, candidate(situation.state, member)
    return sort_key(settings.ordering, asked, now, settings.config.starvation_bound_s)
