"""Admission of waiting deployments: quotas, priorities, weighted fairness and response ratio
(PlexRL §5.2.3).

Waiting deployments are considered in the order of `admission.order`. A job that asked for a gang
gets GPUs for all its deployments at once, or for none. A deployment that has waited beyond the
starvation bound blocks all deployments behind it from free GPUs that it may need; without
backfilling every waiting deployment does so. A deployment that could not get GPUs even if all other
jobs ended (`fit.feasibility`) blocks no other.
"""

from dataclasses import dataclass

from plexrl.scheduler.accounting.fair_shares import begin_to_wait
from plexrl.scheduler.admission.admission_pass import AdmissionPass
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.placement import patience_ends_at
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import Deployment


def enqueue_deployment(cluster: Cluster, effects: Effects, deployment: Deployment) -> None:
    """Enqueue a new deployment; it is considered at the end of this event."""
    if not deployment.preemptible:
        begin_to_wait(
            cluster.holdings,
            cluster.waiting.by_tenant,
            cluster.state.job(deployment.job).tenant,
            deployment.created_at,
        )
    cluster.wait(deployment)
    cluster.waiting.newcomers.append(deployment.deployment)
    if _has_patience(cluster.settings, deployment):
        effects.wake(patience_ends_at(cluster.settings, deployment), timers.PLACEMENT)


def patience_ends(cluster: Cluster) -> list[float]:
    """When the patience of each waiting deployment ends: timers to set after a change of the
    settings."""
    waiting = [cluster.state.deployment(name) for name in sorted(cluster.waiting)]
    return [
        patience_ends_at(cluster.settings, each)
        for each in waiting
        if _has_patience(cluster.settings, each)
    ]


def _has_patience(settings: Settings, deployment: Deployment) -> bool:
    """Whether the deployment may share a group once its patience has ended."""
    return settings.policy.repacks and deployment.shares and not deployment.preemptible


@dataclass(slots=True)
class Admission:
    """Decides which waiting deployments get GPUs."""

    cluster: Cluster
    interrupted: AdmissionPass | None = None
    """The pass that was interrupted; at most one."""

    def admit(self, effects: Effects, now: float) -> list[Deployment]:
        """Place all deployments that can be placed now; returns them in the order of admission.

        All waiting deployments are considered if capacity has become free; otherwise only the new
        ones, because the others have already failed on the same capacity.

        A pass of more than `admission_steps` is interrupted, and a timer that is due at once
        continues it. What would cause another pass meanwhile is deferred to its end. If capacity
        has become free, the pass begins again instead, so that it is offered in order; but only
        once, so that the last deployments of the order are reached too.
        """
        waiting, going_on = self.cluster.waiting, self.interrupted
        is_due, all_waiting = waiting.must_continue, waiting.must_retry
        newcomers = waiting.take_newcomers()
        if going_on is not None:
            if all_waiting and not going_on.progress.has_begun_again:
                going_on = AdmissionPass.begin(self.cluster, now, None, has_begun_again=True)
                self.interrupted = going_on
            else:
                going_on.progress.deferred_newcomers += newcomers
                going_on.progress.deferred_retry |= all_waiting
            # An event between has work of its own; the pending timer continues the pass.
            return self._continue(effects, going_on, now) if is_due else []
        still_waiting = [name for name in newcomers if name in waiting]
        if not (waiting if all_waiting else still_waiting):
            return []
        begun = AdmissionPass.begin(self.cluster, now, None if all_waiting else still_waiting)
        return self._continue(effects, begun, now)

    def skip(self) -> None:
        """Forget newcomers and an interrupted pass: they are considered again with all others."""
        self.cluster.waiting.take_newcomers()
        self.interrupted = None

    def _continue(self, effects: Effects, going_on: AdmissionPass, now: float) -> list[Deployment]:
        placed = going_on.run(now, self.cluster.settings.config.admission_steps)
        progress = going_on.progress
        if progress.is_over:
            self.interrupted = None
            # What was deferred is due in this event.
            self.cluster.waiting.newcomers += progress.deferred_newcomers
            self.cluster.waiting.must_retry |= progress.deferred_retry
        else:
            self.interrupted = going_on
            effects.wake(now, timers.ADMISSION)
        return placed
