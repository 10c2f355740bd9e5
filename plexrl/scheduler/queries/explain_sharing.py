"""Explains why a rollout shares its GPUs or not, if that was left to the scheduler."""

import math

from plexrl.scheduler.admission.automatic_sharing import partners, takes_turns_with
from plexrl.scheduler.placement.contention.colocation import may_take_turns, takes_turns
from plexrl.scheduler.placement.contention.service_level import waiting_bound
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.queries.explain_placement import name_for
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.rules.switch_cost import moves_at_best_s
from plexrl.scheduler.state.records import Deployment


def why_it_shares(queues: Queues, deployment: Deployment, *, sees_all: bool) -> str:
    """Why the rollout shares its GPUs or not; empty: its controller said so, or it is none.
    `sees_all`: for an operator, who may see which other tenant's job waited."""
    if not deployment.spec.shares_if_scarce:
        return ""
    if deployment.spec.exclusive:
        return f"has GPUs of its own: {_why_alone(queues, deployment)}"
    others = partners(queues, deployment)
    rest = "".join(
        [
            f"; switches with {other.deployment} take about "
            f"{_switches_s(queues, deployment, other):.1f} s a step"
            for other in others[:1]
        ]
    )
    return f"shares GPUs: {_why_shared(queues, deployment, sees_all)}{rest}"


def _why_shared(queues: Queues, rollout: Deployment, sees_all: bool) -> str:
    name = rollout.spec.shares_for
    assert name is not None, f"{rollout.deployment} has begun to share"
    if name == rollout.deployment:
        return "there were none of its own for it"
    waiting = queues.state.deployments.get(name)
    if waiting is None:
        return "another deployment waited for GPUs"
    waits = "waits" if name in queues.waiting else "waited"
    who = name_for(queues.state, name, rollout, sees_all=sees_all)
    return f"{who} {waits} for {waiting.spec.workers} GPUs"


def _why_alone(queues: Queues, rollout: Deployment) -> str:
    others = partners(queues, rollout)
    if not queues.settings.policy.repacks:
        return f"policy {queues.settings.policy.name} does not plan by time"
    if not others:
        return "no other deployment of its job has as many GPUs or more and shares them"
    if not queues.waiting:
        return "nobody waits for GPUs"
    if any(takes_turns_with(queues, rollout, other) for other in others):
        return "nobody waits for more GPUs than are free"
    if not any(may_take_turns((rollout, other)) for other in others):
        return "it works at the same time as the other deployments of its job"
    if not any(takes_turns((rollout, other)) for other in others):
        return "its demand, or that of its job's other deployments, is not measured yet"
    least_s = min(_switches_s(queues, rollout, other) for other in others)
    bound = waiting_bound(queues, rollout)
    return (
        f"switches of {least_s:.1f} s a step, or a guess, may break its service level {bound:.0%}"
    )


def _switches_s(situation: Situation, rollout: Deployment, other: Deployment) -> float:
    """Seconds of a step in which one's state goes and the other's comes, twice."""
    return math.fsum([sum(moves_at_best_s(situation.state, each)) for each in (rollout, other)])
