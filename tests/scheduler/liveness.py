"""Why each accepted operation of a core will be looked at again; a core without this is stuck.

An operation that has not ended must have a *cause* to go on: something under way outside the core
whose report touches it (a run, a launch, a copy, a node or a router that is away), a timer, another
operation with a cause of its own, or GPUs that others have. The causes are read off the state and
what the cluster was told, without the core's own rules of turns.
"""

from collections.abc import Iterator

from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group, State
from plexrl.wire.operations import OperationState
from tests.scheduler.fake_cluster import FakeCluster


def stuck(cluster: FakeCluster) -> list[str]:
    """What is accepted, not final, and has no cause to go on."""
    return list(_Look(cluster).stuck())


class _Look:
    """One look at a core between two events."""

    def __init__(self, cluster: FakeCluster) -> None:
        context = cluster.core._context
        self._cluster = cluster
        self._state: State = context.state
        self._timers = {what for at, what in context.effects.timers if at > cluster.now - 1e-9}
        # Nothing ever comes due without a wake-up that the shell was asked for.
        self._is_awake = not context.effects.timers or context.effects.timer_at is not None
        sent = {(run.operation, run.token) for run in cluster.runs}
        launches = {(each.deployment, each.incarnation) for each in cluster.launches}
        self._sent, self._launches = sent | cluster.hung, launches | cluster.hung
        self._migrations = {each.deployment for each in cluster.migrations}

    def stuck(self) -> Iterator[str]:
        if not self._is_awake:
            yield "there are timers and no wake-up was asked for"
        for name, operation in self._state.operations.items():
            if operation.state.is_final:
                continue
            deployment = self._state.deployments.get(operation.deployment)
            if deployment is None:
                yield f"{name}: its deployment is forgotten"
            elif not self._has_cause(deployment, operation, set()):
                yield f"{name} ({operation.kind}, {operation.state}) on {self._tell(deployment)}"

    def _tell(self, deployment: Deployment) -> str:
        group = (
            self._state.groups.get(deployment.placement.group)
            if deployment.placement.group
            else None
        )
        return (
            f"{deployment.deployment} {deployment.wpg.state} {deployment.wpg.residency} queue="
            f"{deployment.work.queue[:4]} running={list(deployment.work.running)} moving="
            f"{deployment.wpg.moving and deployment.wpg.moving.operation} replaying="
            f"{deployment.work.replay.replaying[:3]} "
            f"relocation={deployment.wpg.moves.planned} group={group}"
        )

    def _has_cause(
        self, deployment: Deployment, operation: Operation, seen: set[OperationId]
    ) -> bool:
        if operation.operation in seen:
            # Two that wait for each other.
            return False
        seen = seen | {operation.operation}
        if operation.state == OperationState.RUNNING:
            return self._is_in_flight(deployment, operation.operation)
        if operation.operation not in deployment.work.queue:
            return False
        return self._goes_on(deployment, seen)

    def _is_in_flight(self, deployment: Deployment, name: OperationId) -> bool:
        command = deployment.work.running.get(name)
        if command is None and deployment.wpg.moving is not None:
            command = deployment.wpg.moving if deployment.wpg.moving.operation == name else None
        if command is None:
            return False
        # A worker that hangs never reports: only its deadline ends its run.
        if timers.overdue(deployment.deployment) not in self._timers:
            return False
        return (name, command.token) in self._sent or not self._cluster.has_router

    def _goes_on(self, deployment: Deployment, seen: set[OperationId]) -> bool:
        """Whether something will happen after which the deployment's queue is looked at."""
        match deployment.wpg.state:
            case WpgState.WAITING:
                cluster = self._cluster.core._context.cluster
                name = deployment.deployment
                return name in cluster.queues.waiting or name in cluster.queues.fillers
            case WpgState.LAUNCHING | WpgState.RECOVERING:
                key = (deployment.deployment, deployment.wpg.processes.incarnation)
                has_deadline = timers.overdue(deployment.deployment) in self._timers
                return (
                    (key in self._launches and has_deadline)
                    or timers.launch(deployment.deployment) in self._timers
                    or self._misses_a_node(deployment)
                )
            case WpgState.MIGRATING:
                return (
                    deployment.deployment in self._migrations
                    or timers.migration(deployment.deployment) in self._timers
                    or self._misses_a_node(deployment)
                )
            case WpgState.READY:
                return self._has_a_turn(deployment, seen)
            case _:
                return False

    def _misses_a_node(self, deployment: Deployment) -> bool:
        nodes = self._state.nodes
        names = {
            *deployment.placement.nodes,
            *deployment.wpg.stored.nodes,
            *deployment.wpg.stored.awaited_nodes,
        }
        if any(not nodes[name].alive for name in names):
            return True
        return any(rank.gpu >= nodes[rank.node].gpus for rank in deployment.placement.ranks)

    def _has_a_turn(self, deployment: Deployment, seen: set[OperationId]) -> bool:
        if self._is_busy(deployment):
            return True
        waits_for = self._dependency(deployment)
        if waits_for is not None:
            owner = self._state.deployments[waits_for.deployment]
            if self._has_cause(owner, waits_for, seen):
                return True
        if waits_for is not None:
            return False
        return any(self._group_goes_on(each, deployment) for each in self._reserved(deployment))

    def _reserved(self, deployment: Deployment) -> list[Group]:
        """Its groups, and those that a member waits for that may have reserved one of them."""
        found, left = dict[str, Group](), list(deployment.placement.groups)
        while left:
            group = self._state.groups[left.pop()]
            if group.group not in found:
                found[group.group] = group
                members = [self._state.deployments[name] for name in group.members]
                left += [
                    name for each in members if each.work.queue for name in each.placement.groups
                ]
        return list(found.values())

    def _is_busy(self, deployment: Deployment) -> bool:
        names = list(deployment.work.running)
        if deployment.wpg.moving is not None:
            names.append(deployment.wpg.moving.operation)
        return any(self._is_in_flight(deployment, name) for name in names)

    def _dependency(self, deployment: Deployment) -> Operation | None:
        """The publish that the deployment's next operation waits for, if it has not ended."""
        group = self._state.groups[deployment.placement.group or ""]  # type: ignore[index]
        names: list[OperationId] = []
        if group.holder == deployment.deployment and deployment.work.replay.replaying:
            names = deployment.work.replay.replaying[:1]
        elif deployment.work.queue:
            names = deployment.work.queue[:1]
        for name in names:
            after = self._state.operations[name].after
            found = None if after is None else self._state.operations.get(after)
            if found is not None and not found.state.is_final:
                return found
        return None

    def _group_goes_on(self, group: Group, deployment: Deployment) -> bool:
        """Whether a member's report, or a timer, has the group looked at."""
        if timers.group_step(group.group) in self._timers:
            return True
        members = [self._state.deployments[name] for name in (*group.members, *group.fillers)]
        if any(self._is_busy(member) for member in members):
            return True
        if deployment.wpg.moves.planned is None:
            return False
        # It stops for a move: that waits for a pull of its weights, which has a cause or has not.
        return any(self._pulls(other, deployment.deployment) for other in self._of_job(deployment))

    def _of_job(self, deployment: Deployment) -> list[Deployment]:
        names = self._state.jobs[deployment.job].deployments
        return [self._state.deployments[name] for name in names]

    def _pulls(self, other: Deployment, source: DeploymentId) -> bool:
        return any(
            self._state.operations[name].source == source
            for name in (*other.work.queue, *other.work.running)
        )
