"""The scheduler core: `commands = core.handle(event, now)`.

The core is synchronous, and free of clocks, I/O and randomness. The live service and the simulator
use the same object, and a journal of (event, now), replayed into a new core, gives the same state.
An event is checked before anything changes, so a refused event has no effect.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from plexrl.errors import ConflictError, InvalidRequestError, PlexRLError, is_storage_held
from plexrl.ids import DeploymentId, JobId, NodeId, OperationId, TenantId
from plexrl.scheduler.accounting.tenants import (
    api_key_added,
    api_key_granted,
    api_key_revoked,
    authenticate,
    check_budget,
    tenant_configured,
    tenant_created,
)
from plexrl.scheduler.admission.admission import patience_ends
from plexrl.scheduler.admission.awaited_profiles import await_all_profiles
from plexrl.scheduler.core.advance import EVENT, NONE, Fault, has_work, work_off
from plexrl.scheduler.core.cycles import learning_changed
from plexrl.scheduler.core.invariants import check
from plexrl.scheduler.core.outcomes import run_failed, run_finished
from plexrl.scheduler.core.snapshot import decode, encode
from plexrl.scheduler.jobs.controllers import (
    check_controller,
    controller_attached,
    controller_seen,
    failure_acknowledged,
    job_finished,
    job_key_added,
    job_keys_revoked,
    job_submitted,
    seen,
)
from plexrl.scheduler.jobs.deployments import (
    check_not_ended,
    deployment_created,
    deployment_ended,
    deployment_relaid,
)
from plexrl.scheduler.jobs.lifecycle import (
    excuse_silence,
    has_gpu,
    restart,
    restart_when_there_is_room,
    router_joined,
    router_lost,
    worker_ready,
)
from plexrl.scheduler.operations.deadlines.cancellation import await_deadline, cancel, stop_rows
from plexrl.scheduler.operations.deadlines.overdue import watch_all
from plexrl.scheduler.operations.failures import check_not_halted, failure_view, job_failure
from plexrl.scheduler.operations.operations import enqueue
from plexrl.scheduler.operations.submission.backpressure import check_room
from plexrl.scheduler.operations.submission.checks import check_deadline, check_same, check_source
from plexrl.scheduler.operations.submission.lost_payloads import lost_payloads, replace_payload
from plexrl.scheduler.placement.cluster import Cluster, Context, reconfigure
from plexrl.scheduler.queries.eta import record_estimate
from plexrl.scheduler.queries.event_records import ClusterRecords
from plexrl.scheduler.queries.explain_job import explain_job
from plexrl.scheduler.queries.overview.totals import cluster_totals
from plexrl.scheduler.queries.views import (
    deployment_view,
    ended_since,
    group_view,
    job_view,
    list_jobs,
    node_view,
    operation_view,
    tenant_view,
)
from plexrl.scheduler.recovery.nodes import (
    node_drain_changed,
    node_joined,
    node_lost,
    node_removed,
    state_migrated,
)
from plexrl.scheduler.rules.config import SchedulerConfig, with_core_settings
from plexrl.scheduler.rules.limits import RANGES, check_numbers
from plexrl.scheduler.rules.lookups import (
    check_live,
    find_deployment,
    find_job,
    find_operation,
    job_named,
    owner_of,
)
from plexrl.scheduler.rules.switch_cost import state_reported
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Job
from plexrl.scheduler.state.tenant import KeyOwner
from plexrl.wire.messages import Command
from plexrl.wire.messages import cluster_views as cv
from plexrl.wire.messages import views as vt
from plexrl.wire.operations import HALTED, USER_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable


class SchedulerCore:
    """All decisions of a cluster's scheduler. `settings`: those in force."""

    def __init__(self, config: SchedulerConfig, context: Context | None = None) -> None:
        """`context`: what a snapshot restores; without it the cluster is empty."""
        self._config = config
        self._begin(Context(config) if context is None else context)

    def _begin(self, context: Context) -> None:
        self._context, self._state, self.settings = context, context.state, context.settings
        self._cluster, self._effects = context.cluster, context.effects
        self._handlers: dict[type[ev.Event], Callable[[Any, float], None]] = {
            ev.SchedulerStarted: self._scheduler_started,
            ev.NodeJoined: partial(node_joined, context),
            ev.NodeLost: partial(node_lost, context),
            ev.RouterJoined: partial(router_joined, context),
            ev.RouterLost: partial(router_lost, context),
            ev.TenantCreated: partial(tenant_created, context.state),
            ev.ApiKeyAdded: partial(api_key_added, context.state),
            ev.ApiKeyGranted: partial(api_key_granted, context.state),
            ev.ApiKeyRevoked: partial(api_key_revoked, context.state),
            ev.TenantConfigured: self._tenant_configured,
            ev.NodeDrainChanged: partial(node_drain_changed, context),
            ev.NodeRemoved: partial(node_removed, context.cluster),
            ev.StateMigrated: partial(state_migrated, context),
            ev.StateReported: self._state_reported,
            ev.JobSubmitted: partial(job_submitted, context),
            ev.ControllerSeen: partial(controller_seen, context),
            ev.ControllerAttached: partial(controller_attached, context),
            ev.FailureAcknowledged: partial(failure_acknowledged, context.state),
            ev.JobFinished: partial(job_finished, context),
            ev.JobKeyAdded: partial(job_key_added, context),
            ev.JobKeysRevoked: partial(job_keys_revoked, context),
            ev.DeploymentCreated: partial(deployment_created, context),
            ev.DeploymentRelaid: partial(deployment_relaid, context),
            ev.DeploymentEnded: partial(deployment_ended, context),
            ev.WorkerReady: self._worker_ready,
            ev.WorkerExited: self._worker_exited,
            ev.OperationSubmitted: self._operation_submitted,
            ev.OperationCancelled: self._operation_cancelled,
            ev.OperationFinished: partial(run_finished, context),
            ev.OperationFailed: partial(run_failed, context),
            ev.TimerFired: self._timer_fired,
            ev.ServiceResumed: partial(excuse_silence, context.state),
        }

    def handle(self, event: ev.Event, now: float, skipped: frozenset[str] = NONE) -> list[Command]:
        """Handle `event` at `now` (seconds, never decreasing); returns the commands.

        `skipped` names steps that failed when the same event was handled before.

        Raises:
            PlexRLError: the event is refused, and nothing has changed.
            Fault: a step failed halfway; the core must not be used any more.
        """
        context, kind = self._context, type(event)
        try:
            if kind in RANGES:
                check_numbers(event)
            self._handlers[kind](event, now)
        except MemoryError:
            raise
        except Exception as error:
            if isinstance(error, PlexRLError) and not has_work(context):
                raise
            raise Fault(EVENT, error) from error
        work_off(context, now, skipped)
        return context.effects.take_commands()

    def become(self, other: "SchedulerCore") -> None:
        """Take over the state of `other`, which must not be used any more."""
        self._begin(other._context)

    @property
    def config(self) -> SchedulerConfig:
        """The configuration at construction; `SchedulerStarted` may have changed settings since."""
        return self._config

    def dump(self) -> bytes:
        """A snapshot for `restore`; call it between events only."""
        return encode(self._context)

    @classmethod
    def restore(cls, config: SchedulerConfig, body: bytes) -> "SchedulerCore":
        """The core that wrote the snapshot `body`: its decisions are the same. Its settings are
        those of the snapshot, until the next `SchedulerStarted`. Raises `StorageError`: another
        version of PlexRL wrote it."""
        return cls(config, decode(body, config))

    @property
    def cluster(self) -> Cluster:
        """State and indexes, for queries to read; only the core's steps change them."""
        return self._cluster

    def check_invariants(self) -> None:
        """Assert the invariants of `plexrl.scheduler.state`."""
        check(self._context)

    def _scheduler_started(self, event: ev.SchedulerStarted, now: float) -> None:
        if event.settings:
            self._take_settings(event.settings)
            for at in patience_ends(self._cluster.queues):
                self._effects.wake(at, timers.PLACEMENT)
            await_all_profiles(self._context)
        state = self._state
        state.routers.clear()
        for node in state.nodes.values():
            node.alive = False
            self._cluster.capacity.inventory.node_changed(node)
        self._effects.timer_at = None
        excuse_silence(self._state, event, now)
        watch_all(self._context.step(now))

    def _take_settings(self, settings: dict[str, Any]) -> None:
        learned = self.settings.learns
        reconfigure(self._cluster, with_core_settings(self.settings.config, settings))
        if self.settings.learns != learned:
            learning_changed(self._cluster)

    def _state_reported(self, event: ev.StateReported, now: float) -> None:
        state_reported(self._context.step(now), event)

    def _tenant_configured(self, event: ev.TenantConfigured, now: float) -> None:
        del now
        tenant_configured(self._state, event)
        self._cluster.queues.waiting.retry_all()

    def _worker_ready(self, event: ev.WorkerReady, now: float) -> None:
        deployment = self._current(event.deployment, event.incarnation)
        if deployment is None or not 0 <= event.rank < len(deployment.placement.ranks):
            return
        if has_gpu(self._state, deployment.placement.ranks[event.rank]):
            # Else its node was lost: a node that comes back reports its workers.
            worker_ready(self._effects, deployment, event.rank, event.address, now)

    def _worker_exited(self, event: ev.WorkerExited, now: float) -> None:
        deployment = self._current(event.deployment, event.incarnation)
        if deployment is None:
            return
        reason = f"rank {event.rank}: {event.reason}"
        if is_storage_held(event.code):
            restart_when_there_is_room(self._context, deployment, reason, now)
        else:
            restart(self._context, deployment, reason, now)

    def _current(self, name: DeploymentId, incarnation: int) -> Deployment | None:
        """The deployment, if that incarnation of its workers is the present one."""
        deployment = self._state.deployments.get(name)
        if deployment is None or deployment.wpg.processes.incarnation != incarnation:
            return None
        gone = (WpgState.STOPPED, WpgState.MIGRATING, WpgState.WAITING)
        # While a launch waits for free space, the former processes are stopped.
        waits = deployment.wpg.processes.launch_at is not None
        return None if waits or deployment.wpg.state in gone else deployment

    def _operation_submitted(self, event: ev.OperationSubmitted, now: float) -> None:
        context, state = self._context, self._state
        deployment = find_deployment(state, event.deployment)
        job = state.jobs[deployment.job]
        check_controller(job, event.controller)
        known = state.operations.get(event.operation)
        if known is not None:
            check_same(known, event)
            if owner_of(state, known) is None:
                raise ConflictError(
                    f"operation id {event.operation!r} was used by a former job: choose another"
                )
            replace_payload(context.effects, deployment, known, event.payload)
            return
        check_live(job)
        check_not_ended(deployment)
        check_budget(self._cluster.holdings, job.tenant, now, event.kind)
        if event.kind not in USER_KINDS[deployment.spec.kind]:
            raise InvalidRequestError(
                f"{event.kind.value} is no operation of a {deployment.spec.kind} deployment: "
                f"{deployment.deployment!r} takes "
                + ", ".join(sorted(kind.value for kind in USER_KINDS[deployment.spec.kind]))
            )
        source = None if event.source is None else find_deployment(state, event.source)
        check_source(event, deployment, source)
        if source is not None:
            check_not_ended(source)
        if event.deadline_s is not None:
            check_deadline(event.deadline_s)
        if event.kind in HALTED:
            check_not_halted(deployment)
            if source is not None:
                check_not_halted(source)
        check_room(context, event, deployment, source)
        if not event.from_job_key:
            seen(context, job, now)
        step = context.step(now)
        operation = enqueue(step, event, deployment)
        record_estimate(step, deployment, operation)
        if event.deadline_s is not None:
            await_deadline(context.effects, operation)

    def _operation_cancelled(self, event: ev.OperationCancelled, now: float) -> None:
        operation = self._operation(event.operation)
        deployment = self._deployment(operation.deployment)
        check_controller(self._job(deployment.job), event.controller)
        if event.rows is None:
            cancel(self._context.step(now), operation)
        else:
            stop_rows(self._context.step(now), operation, event.rows)

    def _timer_fired(self, event: ev.TimerFired, now: float) -> None:
        """The pending wake-up has fired; due timers are handled after every event."""
        del event, now
        self._effects.timer_at = None

    def _job(self, name: JobId) -> Job:
        return find_job(self._state, name)

    def _deployment(self, name: DeploymentId) -> Deployment:
        return find_deployment(self._state, name)

    def _operation(self, name: OperationId) -> Operation:
        return find_operation(self._state, name)

    def tenant_of_job(self, job: JobId) -> TenantId:
        """The owner of a job. Raises `UnknownJobError`."""
        return self._job(job).tenant

    def tenant_of_deployment(self, deployment: DeploymentId) -> TenantId:
        """The owner of a deployment. Raises `UnknownDeploymentError`."""
        return self.tenant_of_job(self._deployment(deployment).job)

    def tenant_of_operation(self, operation: OperationId) -> TenantId:
        """The owner of an operation. Raises `UnknownOperationError`."""
        return self.tenant_of_deployment(self._operation(operation).deployment)

    def operation_view(
        self, operation: OperationId, now: float, *, sees_all: bool = False
    ) -> vt.PolledOperationView:
        """One operation, with the first unacknowledged failure of its job as `job_failure`; an
        operator `sees_all`. Raises `UnknownOperationError`."""
        found = self._operation(operation)
        failure = job_failure(self._state, self._job(self._deployment(found.deployment).job))
        view = operation_view(self._cluster, found, now, sees_all=sees_all)
        return {**view, "job_failure": failure_view(failure)}

    def check_controller(
        self,
        controller: str,
        tenant: TenantId | None,
        *,
        job: JobId | None = None,
        deployment: DeploymentId | None = None,
        operation: OperationId | None = None,
    ) -> None:
        """Refuse a query of a former controller about its job or a part of it. Unknown names and
        those of other tenants pass: the query itself refuses them. Raises
        `ControllerReplacedError`."""
        found = job_named(self._state, job, deployment, operation)
        if found is not None and tenant in (None, found.tenant):
            check_controller(found, controller)

    def is_final(self, operation: OperationId) -> bool:
        """Whether the operation has ended. Raises `UnknownOperationError`."""
        return self._operation(operation).state.is_final

    def ended_since(self, count: int) -> tuple[int, list[OperationId] | None]:
        """(number of ended operations, names of those after the first `count`; None: dropped)."""
        return ended_since(self._state, count)

    def deployment_view(self, deployment: DeploymentId, now: float) -> vt.DeploymentView:
        """One deployment. Raises `UnknownDeploymentError`."""
        del now
        return deployment_view(self._state, self._deployment(deployment))

    def job_view(self, job: JobId, now: float) -> vt.JobView:
        """One job. Raises `UnknownJobError`."""
        del now
        return job_view(self._cluster, self._job(job))

    def explain_job(self, job: JobId, now: float, *, sees_all: bool = False) -> vt.ExplainedJobView:
        """Why a job waits or how it runs; an operator `sees_all`. Raises `UnknownJobError`."""
        return explain_job(self._cluster, self._job(job), now, sees_all=sees_all)

    def list_jobs(self, tenant: TenantId | None, now: float) -> list[vt.JobView]:
        """All jobs of a tenant, or of all tenants, oldest first."""
        del now
        return list_jobs(self._cluster, tenant)

    def jobs_of(self, tenant: TenantId) -> list[JobId]:
        """Ids of all stored jobs of a tenant."""
        return [job.job for job in self._state.jobs.values() if job.tenant == tenant]

    def list_nodes(self, tenant: TenantId | None = None) -> list[cv.NodeView]:
        """All nodes, as visible to a tenant or (None) the operator."""
        return [
            node_view(self._cluster.capacity, node, tenant) for node in self._state.nodes.values()
        ]

    def node_machines(self) -> dict[NodeId, str]:
        """The machine of each node, as its agent last said; empty: unknown."""
        return {node.node: node.machine for node in self._state.nodes.values()}

    def list_groups(self, now: float) -> list[cv.GroupView]:
        """All node groups."""
        del now
        return [group_view(self._cluster, group) for group in self._state.groups.values()]

    def status(self, now: float, tenant: TenantId | None = None) -> cv.ClusterView:
        """Counts of the cluster, as visible to a tenant or (None) the operator."""
        return cluster_totals(self._cluster, tenant, now)

    def lost_payloads(self, job: JobId) -> list[OperationId]:
        """The operations whose payload the job's controller is to send again."""
        return lost_payloads(self._state, self._job(job))

    def authenticate(self, key_digest: str, now: float) -> KeyOwner:
        """The owner of the API key with this digest. Raises `AuthenticationError`."""
        return authenticate(self._state, key_digest, now)

    def list_tenants(self, now: float) -> list[cv.TenantView]:
        """All tenants, with their limits, GPUs and use."""
        holdings, tenants = self._cluster.holdings, self._state.tenants.values()
        return [tenant_view(holdings, self.settings, tenant, now) for tenant in tenants]

    def records(self, ended_job_s: float) -> ClusterRecords:
        """Records of all objects, for an MQTT broker; see `ClusterRecords` for `ended_job_s`."""
        return ClusterRecords(lambda: self._state, ended_job_s)

    def tenants(self) -> list[TenantId]:
        """All tenants, in the order of their creation."""
        return list(self._state.tenants)
