"""The queues for GPUs: deployments without any, preemptible ones, and those that are to move.

This module alone puts deployments into these queues. All of them, but for the newcomers and the
retry that belong to one event, follow from the state.
"""

from dataclasses import dataclass, field

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.waiting.waiting import Waiting
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Job, State


@dataclass(slots=True)
class Queues:
    """The deployments that are to get GPUs, or other ones."""

    capacity: Capacity
    """Tells what a waiting deployment would add to the load of a group."""
    settings: Settings = field(init=False)
    state: State = field(init=False)
    waiting: Waiting = field(default_factory=Waiting)
    """Deployments without GPUs."""
    fillers: dict[DeploymentId, None] = field(default_factory=dict)
    """Preemptible deployments without a group."""
    relocating: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose move waits for an operation boundary."""

    def __post_init__(self) -> None:
        self.settings, self.state = self.capacity.settings, self.capacity.state
        self.rebuild()

    def rebuild(self) -> None:
        """Derive all of it again: the settings have changed."""
        self.waiting.clear()
        self.fillers.clear()
        self.relocating.clear()
        for deployment in self.state.deployments.values():
            if deployment.wpg.moves.planned is not None:
                self.await_move(deployment)
            is_set_aside = self.state.job(deployment.job).is_set_aside
            if deployment.wpg.state == WpgState.WAITING and not is_set_aside:
                self.wait(deployment)

    def wait(self, deployment: Deployment) -> None:
        """Put the deployment into the queues for GPUs, after all others."""
        job = self.state.job(deployment.job)
        if deployment.spec.preemptible:
            if not job.is_set_aside:
                self.fillers[deployment.deployment] = None
            return
        self.waiting.enter(deployment, job)
        if self._is_placed(job):
            self.waiting.mark_partial(deployment.deployment)
        elif not job.gang:
            self._line_up([deployment], job)
            # The job has lost its last GPUs: its other deployments are in queues again.
            for name in job.deployments:
                if name in self.waiting.of_partial_jobs:
                    self._line_up([self.state.deployment(name)], job)
        elif len(job.deployments) >= job.gang:
            gang = [self.state.deployment(name) for name in job.deployments if name in self.waiting]
            self._line_up(gang, job)

    def demand_changed(self, deployment: Deployment) -> None:
        """A waiting deployment has another trace."""
        duty = self.capacity.inventory.duty_when_placed(deployment)
        self.waiting.change_demand(deployment, duty)

    def gpus_changed(self, job: Job) -> None:
        """A deployment of the job got GPUs or gave some back: the others wait in no unit."""
        for name in job.deployments:
            if name in self.waiting:
                self.waiting.mark_partial(name)

    def stop_waiting(self, name: DeploymentId) -> None:
        """Take the deployment out of all queues for GPUs, if it is in one."""
        self.waiting.remove(name)
        self.state.reservations.pop(name, None)
        self.fillers.pop(name, None)

    def await_move(self, deployment: Deployment) -> None:
        """The deployment is to move at its next operation boundary."""
        self.relocating[deployment.deployment] = None

    def end_move(self, deployment: Deployment) -> None:
        """The deployment moves, or does not move any more."""
        self.relocating.pop(deployment.deployment, None)

    def relocating_in_order(self) -> list[Deployment]:
        """The deployments whose move waits, oldest first."""
        moving = map(self.state.deployment, self.relocating)
        return sorted(moving, key=lambda deployment: deployment.serial)

    def _line_up(self, deployments: list[Deployment], job: Job) -> None:
        duty = self.capacity.inventory.duty_when_placed(deployments[0])
        self.waiting.enqueue_unit(deployments, job, duty)

    def _is_placed(self, job: Job) -> bool:
        return any(self.state.deployments[name].has_gpus for name in job.deployments)
