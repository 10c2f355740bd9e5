"""Whether a rollout that leaves it to the scheduler shares its GPUs (`shares_if_scarce`).

It begins with GPUs of its own. It begins to share them, as one with `shares` does, if

* somebody waits for GPUs: another deployment, or one of its own job;
* by their demand it and another deployment of its job work in turns. In asynchronous training they
  do not: each would only wait for the other. While a demand is unknown, it begins to share only if
  its own job waits;
* the switches take no greater part of the time than its job accepts to wait;
* the policy plans by time: others would put it beside anybody.

So a job that is alone on a cluster pays for no switches. From then on the rollout shares until its
end, like one that was created so: it is placed with its training, or moves there where that pays
(`recovery.relocation`). If the whole cluster is too small for all deployments of a job, each with
its own GPUs, the rollout shares from its creation on, whatever its demand and the policy.
"""

from collections.abc import Sequence

from plexrl.errors import CapacityError
from plexrl.ids import DeploymentId
from plexrl.scheduler.admission.awaited_profiles import await_profile
from plexrl.scheduler.admission.fit.size_check import check_it_can_fit
from plexrl.scheduler.admission.queues.gangs import why_not_yet
from plexrl.scheduler.placement.capacity.needs import node_types_compatible
from plexrl.scheduler.placement.capacity.overlaps import follow
from plexrl.scheduler.placement.choice.scarcity import scarce_for
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.placement.contention.colocation import is_worthwhile, may_take_turns
from plexrl.scheduler.placement.contention.service_level import is_tight
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.records import Deployment, Job


def check_it_can_share(context: Context, job: Job, deployment: Deployment) -> None:
    """As `check_it_can_fit`; if a new deployment and the undecided rollouts of its job fit only by
    sharing, these begin to.

    Raises:
        UnavailableError, CapacityError, ModelDoesNotFitError: as there; nothing changed.
    """
    cluster = context.cluster
    try:
        check_it_can_fit(cluster.capacity, job, deployment)
    except CapacityError:
        others = map(cluster.state.deployment, job.deployments)
        undecided = [each for each in (*others, deployment) if each.spec.is_undecided]
        if not undecided or not cluster.settings.anybody_shares:
            raise
        for each in undecided:
            each.spec.suppose(exclusive=False)
        try:
            check_it_can_fit(cluster.capacity, job, deployment)
        finally:
            for each in undecided:
                each.spec.suppose(exclusive=True)
        for each in undecided:
            _begin(context, each, deployment.deployment)


def share_if_scarce(context: Context, rollout: Deployment) -> None:
    """Let an undecided rollout of known demand share if another deployment waits for GPUs."""
    cluster = context.cluster
    if (
        not rollout.spec.is_undecided
        or not cluster.settings.policy.repacks
        or not cluster.queues.waiting
    ):
        return
    if any(takes_turns_with(cluster, rollout, partner) for partner in partners(cluster, rollout)):
        other = scarce_for(cluster, rollout)
        if other is not None:
            _begin(context, rollout, other.deployment)


def share_if_refused(context: Context, newcomers: Sequence[DeploymentId]) -> list[DeploymentId]:
    """Let the undecided rollouts of jobs share whose `newcomers` have found no GPUs. Returns the
    waiting deployments of these jobs, which may find some now."""
    cluster, found = context.cluster, dict[DeploymentId, None]()
    if not cluster.settings.policy.repacks:
        return []
    for name in newcomers:
        newcomer = cluster.state.deployment(name)
        if name in found or newcomer.spec.preemptible or why_not_yet(cluster, newcomer) is not None:
            continue
        others = cluster.state.job(newcomer.job).deployments
        for rollout in map(cluster.state.deployment, others):
            if rollout.spec.is_undecided and any(
                _may_turn(cluster, rollout, partner) for partner in partners(cluster, rollout)
            ):
                _begin(context, rollout, name)
                found.update(
                    dict.fromkeys([other for other in others if other in cluster.queues.waiting])
                )
    return list(found)


def partners(situation: Situation, rollout: Deployment) -> list[Deployment]:
    """The deployments of its job on whose GPUs a rollout can be: those that share, and have as many
    or more."""
    others = map(situation.state.deployment, situation.state.job(rollout.job).deployments)
    return [
        other
        for other in others
        if other.spec.kind != "rollout"
        and other.spec.shares
        and node_types_compatible(other.spec.node_type, rollout.spec.node_type)
        and (
            other.spec.workers == rollout.spec.workers
            or (other.spec.workers > rollout.spec.workers and situation.settings.divides_groups)
        )
    ]


def takes_turns_with(situation: Situation, rollout: Deployment, other: Deployment) -> bool:
    """Whether both are known to work in turns, at a cost of switches that their job accepts."""
    members = (rollout, other)
    is_guess = is_tight(situation, rollout) and any(member.demand.has_prior for member in members)
    return not is_guess and is_worthwhile(situation, members)


def _may_turn(situation: Situation, rollout: Deployment, other: Deployment) -> bool:
    """As `takes_turns_with`, or their demand is unknown."""
    members = (rollout, other)
    if all(member.demand.trace is not None for member in members):
        return takes_turns_with(situation, rollout, other)
    return may_take_turns(members) and not is_tight(situation, rollout)


def _begin(context: Context, rollout: Deployment, waiting: DeploymentId) -> None:
    """Let the rollout share from now on, for a deployment that waits."""
    cluster = context.cluster
    groups = cluster.state.groups_of(rollout)
    for group in groups:
        cluster.capacity.inventory.leave(group)
        group.shared = True
    rollout.spec.begin_to_share(waiting)
    cluster.capacity.inventory.enter_again(groups)
    if rollout.placement.reservation is not None:
        # Until now all of the time was its own.
        follow(cluster.capacity, rollout)
        await_profile(context, rollout)
    if rollout.deployment in cluster.queues.waiting:
        cluster.queues.wait(rollout)
