"""The records of jobs, nodes and groups for an MQTT broker, and which of them have changed.

The state is compared with the records of the last look, so the rules that change it need not
report anything, and no change can be missed. Of several changes between two looks only the last is
seen.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from plexrl.events.records import (
    DeploymentRecord,
    GpuRecord,
    GroupRecord,
    JobRecord,
    NodeRecord,
    PrefetchHint,
    Record,
    topic,
)
from plexrl.scheduler.operations.failures import earlier_failure, job_failure
from plexrl.scheduler.operations.held.holding import foreign_memory_view, foreign_text
from plexrl.scheduler.operations.held.unreturned_memory import reason_for
from plexrl.scheduler.state.group_lock import lock_state
from plexrl.scheduler.state.machines.job_states import FINAL, JobState
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Group, Job, Node, State
from plexrl.wire.messages import Command, PrefetchState
from plexrl.wire.messages.cluster_views import ForeignMemoryView

Change = tuple[str, Record | None]
"""A topic below the prefix and its new record; None: the object does not exist any more."""


class ClusterRecords:
    """The newest record of every job, node and group, by topic."""

    def __init__(self, state: Callable[[], State], ended_job_s: float) -> None:
        """`state` returns the core's state; jobs that ended more than `ended_job_s` seconds ago
        have no record."""
        self._state = state
        self._ended_job_s = ended_job_s
        self._newest: dict[str, Record] = {}
        self._is_first = True
        """No look has been taken: when the states began is unknown."""

    def newest(self) -> dict[str, Record]:
        """The records of the last look."""
        return dict(self._newest)

    def look(self, now: float) -> list[Change]:
        """Compare the state with the last look; returns what has changed."""
        before, found, changes = self._newest, {}, list[Change]()
        for name, record in self._records(now):
            known = before.get(name)
            record = self._with_since(record, known, now)
            if known is None or known != record:
                changes.append((name, record))
            found[name] = record
        changes += [(name, None) for name in before if name not in found]
        self._newest, self._is_first = found, False
        return changes

    def remember_since(self, name: str, state: str, since: float) -> None:
        """A former scheduler process has told the broker since when the object had a state."""
        record = self._newest.get(name)
        if record is not None and record.since is None and record.state == state:
            self._newest[name] = msgspec.structs.replace(record, since=since)

    def _with_since(self, record: Record, known: Record | None, now: float) -> Record:
        if record.since is not None:
            return record
        if known is not None and known.state == record.state:
            since = known.since
        else:
            since = None if self._is_first else now
        return record if since is None else msgspec.structs.replace(record, since=since)

    def _records(self, now: float) -> Iterator[tuple[str, Record]]:
        state, oldest = self._state(), now - self._ended_job_s
        for job in state.jobs.values():
            if job.ended_at is not None and job.state in FINAL:
                if job.ended_at < oldest:
                    continue
                name = topic("jobs", job.tenant, job.job)
                # It does not change any more, and there may be thousands.
                known = self._newest.get(name)
                is_known = known is not None and known.state == job.state.value
                yield name, known if known is not None and is_known else _job(state, job)
            else:
                yield topic("jobs", job.tenant, job.job), _job(state, job)
        foreign = foreign_memory_view(state)
        for node in state.nodes.values():
            own = [each for each in foreign if each["node"] == node.node]
            yield topic("nodes", node.node), _node(node, own)
        for group in state.groups.values():
            yield topic("groups", group.group), _group(group)


def prefetch_hints(commands: Iterable[Command], now: float) -> list[tuple[str, PrefetchHint]]:
    """(topic, hint) of every state that a node is told to prefetch."""
    return [
        (
            topic("prefetch", node),
            PrefetchHint(
                deployment=command.deployment,
                node=node,
                seq=command.seq,
                next_use_s=command.next_use_s,
                at=now,
            ),
        )
        for command in commands
        if isinstance(command, PrefetchState)
        for node in command.nodes
    ]


def _job(state: State, job: Job) -> JobRecord:
    deployments = [state.deployment(name) for name in job.deployments]
    since = job.ended_at
    if since is None and job.state is JobState.QUEUED and not deployments:
        since = job.submitted_at
    return JobRecord(
        state=job.state.value,
        since=since,
        why=_why(state, job, deployments),
        job=job.job,
        tenant=job.tenant,
        name=job.name,
        attached=job.attached,
        priority=job.priority,
        submitted_at=job.submitted_at,
        ended_at=job.ended_at,
        deployments=tuple(
            DeploymentRecord(
                deployment=deployment.deployment,
                kind=deployment.spec.kind,
                state=deployment.wpg.state.value,
                residency=deployment.wpg.residency.value,
                group=deployment.placement.group,
                nodes=tuple(deployment.placement.nodes),
            )
            for deployment in deployments
        ),
    )


def _why(state: State, job: Job, deployments: list[Deployment]) -> str:
    """The reason, without names of other tenants' jobs: a tenant may read its own jobs' topics."""
    if job.state in FINAL:
        return job.reason
    failure = job_failure(state, job)
    if failure is not None:
        return earlier_failure(failure).message
    if job.state is JobState.QUEUED and not deployments:
        return "it has no deployments yet"
    for deployment in deployments:
        if deployment.wpg.state is WpgState.WAITING:
            why = deployment.wpg.moves.last_reason or reason_for(state, deployment, sees_all=False)
            return f"{deployment.deployment} waits for GPUs{f': {why}' if why else ''}"
        if deployment.wpg.backoff.code or (
            not deployment.wpg.is_ready and deployment.wpg.backoff.reason
        ):
            why = reason_for(state, deployment, sees_all=False)
            return f"{deployment.deployment}: {why}"
    if not job.attached:
        return "no controller is attached"
    if job.state is JobState.SUSPENDED:
        return "its training state is not on the GPUs"
    return ""


def _node(node: Node, foreign: list[ForeignMemoryView]) -> NodeRecord:
    if node.alive:
        state, why = "ready", ""
    elif node.lost_at is None:
        state, why = "expected", "its agent has not connected since the scheduler started"
    else:
        state, why = "lost", "the connection to its agent ended"
    if node.alive:
        drain = ["an operator drains it"] if node.is_draining else []
        why = "; ".join([*drain, *map(foreign_text, foreign)])
    return NodeRecord(
        state=state,
        since=None if node.alive else node.lost_at,
        why=why,
        node=node.node,
        draining=node.is_draining,
        gpus=node.gpus,
        gpu_memory_bytes=node.gpu_memory_bytes,
        host_memory_bytes=node.host_memory_bytes,
        nvme_bytes=node.nvme_bytes,
        node_type=node.node_type,
        block=node.block,
    )


def _group(group: Group) -> GroupRecord:
    return GroupRecord(
        state=lock_state(group).value,
        why="it takes no more members" if group.is_closed else "",
        group=group.group,
        holder=group.holder,
        incoming=group.incoming,
        members=tuple(group.members),
        gpus=tuple(GpuRecord(node=gpu.node, gpu=gpu.gpu) for gpu in group.gpus),
        shared=group.shared,
        closed=group.is_closed,
        token=group.token,
    )
