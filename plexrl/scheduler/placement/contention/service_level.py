"""The service level of each job: the greatest part waiting / (waiting + running) that it accepts
(PlexRL §7.2).

It is the job's `slo`; a job without one has the cluster's bound, `waiting_part_max`. A group is
refused if by the prediction any member, or the newcomer, would wait more than its own bound. Some
placement modes predict nothing, because they need no profile. They may put deployments together
whose jobs have the cluster's bound or a looser one. Where a job has a tighter one, a group whose
waiting cannot be predicted is refused, and so is one where a prediction would be a guess: the
demand of a member is that of others like it (`Deployment.has_prior`).
"""

from typing import TYPE_CHECKING

from plexrl.scheduler.rules.settings import Situation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plexrl.ids import DeploymentId
    from plexrl.scheduler.placement.contention.contention import Contention
    from plexrl.scheduler.rules.settings import Settings
    from plexrl.scheduler.state.records import Deployment, Job


def bound_of(settings: "Settings", job: "Job") -> float:
    """The greatest part of their time that the job's deployments may wait."""
    return settings.config.waiting_part_max if job.slo is None else job.slo


def waiting_bound(situation: "Situation", deployment: "Deployment") -> float:
    """The greatest part of its time that the deployment may wait."""
    return bound_of(situation.settings, situation.state.job(deployment.job))


def is_tight(situation: Situation, deployment: "Deployment") -> bool:
    """Whether the deployment has a tighter bound than the cluster's."""
    bound = waiting_bound(situation, deployment)
    return bound < situation.settings.config.waiting_part_max


def has_tight_bound(
    situation: Situation, deployment: "Deployment", members: "Sequence[DeploymentId]"
) -> bool:
    """Whether the deployment, or one of the members, has a tighter bound than the cluster's."""
    others = [situation.state.deployment(name) for name in members]
    return any(is_tight(situation, each) for each in (deployment, *others))


def keeps_bounds(
    situation: Situation,
    deployment: "Deployment",
    members: "Sequence[DeploymentId]",
    expected: "Contention | None",
) -> bool:
    """Whether nobody among `members` would wait more than its bound if `deployment` joined them.

    `expected`: the prediction, the newcomer first and then the members; None: it cannot be made.
    """
    state = situation.state
    residents = [deployment, *[state.deployment(name) for name in members]]
    is_guess = expected is None or any(resident.demand.has_prior for resident in residents)
    if is_guess and has_tight_bound(situation, deployment, members):
        return False
    if expected is None:
        return True
    for each, waiting_part in zip(residents, expected.members, strict=True):
        if waiting_part > waiting_bound(situation, each):
            return False
    return True
