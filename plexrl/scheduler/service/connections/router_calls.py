"""Calls of routers: requests for their callers, and reports of results."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from plexrl.errors import (
    InvalidRequestError,
    NotFoundError,
    PlexRLError,
    UnavailableError,
)
from plexrl.ids import DeploymentId, JobId, OperationId
from plexrl.scheduler.accounting.sharing import sharing_view
from plexrl.scheduler.jobs.quoted_jobs import quoted_jobs
from plexrl.scheduler.queries.eta import eta_quality
from plexrl.scheduler.queries.views import (
    expected_nodes,
    operation_log,
    service_levels,
    unreferenced_payloads,
    usage_view,
)
from plexrl.scheduler.rules.lookups import unknown_deployment, unknown_job, unknown_operation
from plexrl.scheduler.service.connections.conditions import find_conditions
from plexrl.scheduler.service.connections.links import AgentLink
from plexrl.scheduler.service.connections.tenant_calls import TenantCalls, check_operator
from plexrl.scheduler.service.shell import Shell
from plexrl.scheduler.state.machines.job_states import JobState
from plexrl.scheduler.state.messages import calls
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import Ask, Report, Scope
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages import cluster_views as cv
from plexrl.wire.messages import views as vt
from plexrl.wire.messages.node_queries import (
    Checkpoints,
    CheckpointView,
    JobCheckpoints,
    JobLogs,
    ListCheckpoints,
    Logs,
    ReadLog,
    SilentNodeView,
)
from plexrl.wire.messages.reports import OperationFailed, OperationFinished
from plexrl.wire.rpc import method_of

AnswerT = TypeVar("AnswerT")

WAIT_S_MAX = 120.0
LOG_PAGE_MAX = 1000
QUERY_NODE_TIMEOUT_S = 10.0


class RouterCalls:
    """Calls of routers."""

    def __init__(self, shell: Shell, tenants: TenantCalls) -> None:
        self._shell = shell
        self._core = shell.core
        self._tenants = tenants

    def requests(self) -> dict[str, Ask]:
        """Calls on behalf of a tenant or an operator."""
        own = (
            calls.on_request(m.LIST_USAGE, calls.Nothing, self._list_usage),
            calls.on_request(m.DRAIN_NODE, ev.NodeDrainChanged, self._drain_node),
            calls.on_request(m.REMOVE_NODE, ev.NodeRemoved, self._remove_node),
            calls.on_request(m.EXPLAIN_JOB, calls.OneJob, self._explain_job),
            calls.on_request(m.SUBMIT_JOB, calls.SubmitJob, self._submit_job),
            calls.on_request(m.FINISH_JOB, ev.JobFinished, self._change_job),
            calls.on_request(m.HEARTBEAT, ev.ControllerSeen, self._heartbeat),
            calls.on_request(m.ADD_JOB_KEY, ev.JobKeyAdded, self._change_job_keys),
            calls.on_request(m.REVOKE_JOB_KEYS, ev.JobKeysRevoked, self._change_job_keys),
            calls.on_request(m.ATTACH_JOB, ev.ControllerAttached, self._change_job),
            calls.on_request(m.ACKNOWLEDGE, ev.FailureAcknowledged, self._acknowledge),
            calls.on_request(m.LIST_JOBS, calls.Nothing, self._list_jobs),
            calls.on_request(m.GET_JOB, calls.OneJob, self._get_job),
            calls.on_request(m.CREATE_DEPLOYMENT, ev.DeploymentCreated, self._create_deployment),
            calls.on_request(m.RELAYOUT_DEPLOYMENT, ev.DeploymentRelaid, self._change_deployment),
            calls.on_request(m.END_DEPLOYMENT, ev.DeploymentEnded, self._change_deployment),
            calls.on_request(m.GET_DEPLOYMENT, calls.OneDeployment, self._get_deployment),
            calls.on_request(m.SUBMIT_OPERATION, ev.OperationSubmitted, self._submit_operation),
            calls.on_request(m.CANCEL_OPERATION, ev.OperationCancelled, self._cancel_operation),
            calls.on_request(m.WAIT_OPERATION, calls.WaitOperation, self._wait_operation),
            calls.on_request(m.LIST_OPERATIONS, calls.ListOperations, self._list_operations),
            calls.on_request(m.LIST_NODES, calls.Nothing, self._list_nodes),
            calls.on_request(m.LIST_GROUPS, calls.Nothing, self._list_groups),
            calls.on_request(m.READ_LOG, ReadLog, self._read_log),
            calls.on_request(m.LIST_CHECKPOINTS, ListCheckpoints, self._list_checkpoints),
        )
        return {**self._tenants.requests(), **dict(own)}

    def reports(self) -> dict[str, Report]:
        """Calls of the router itself."""
        queries = (
            calls.on_query(m.CONDITIONS, calls.Nothing, self._conditions),
            calls.on_query(m.ETA_QUALITY, calls.Nothing, self._eta_quality),
            calls.on_query(m.SERVICE_LEVELS, calls.Nothing, self._service_levels),
            calls.on_query(m.NEEDLESS_PAYLOADS, calls.NeedlessPayloads, self._needless_payloads),
        )
        return {
            **self._tenants.reports(),
            **dict(queries),
            method_of(OperationFinished): (OperationFinished, self._operation_finished),
            method_of(OperationFailed): (OperationFailed, self._operation_failed),
        }

    # The cluster

    async def _conditions(self, _: calls.Nothing) -> cv.ConditionsView:
        return {"conditions": find_conditions(self._shell)}

    async def _eta_quality(self, _: calls.Nothing) -> cv.EtaQualityView:
        return eta_quality(self._core.cluster.state.eta_errors)

    async def _service_levels(self, _: calls.Nothing) -> cv.ServiceLevels:
        return {"jobs": service_levels(self._core.cluster)}

    async def _needless_payloads(self, call: calls.NeedlessPayloads) -> cv.NeedlessPayloadsView:
        # A leader that was replaced unnoticed would miss operations accepted since.
        await self._shell.confirm_lead()
        return {"blobs": unreferenced_payloads(self._core.cluster.state, call.blobs)}

    async def _list_usage(self, scope: Scope, _: calls.Nothing) -> cv.UsageReport:
        state = self._core.cluster.state
        return {
            "usage": usage_view(state, scope),
            "sharing": sharing_view(state, scope, self._now()),
            "quoted": quoted_jobs(state, scope),
        }

    async def _drain_node(self, scope: Scope, event: ev.NodeDrainChanged) -> cv.NodeView:
        check_operator(scope)
        await self._shell.request(event)
        (drained,) = [node for node in self._nodes(None) if node["node"] == event.node]
        return drained

    async def _remove_node(self, scope: Scope, event: ev.NodeRemoved) -> cv.ForgottenNode:
        check_operator(scope)
        await self._shell.request(event)
        return {"node": event.node}

    async def _list_groups(self, scope: Scope, _: calls.Nothing) -> cv.Groups:
        check_operator(scope)
        return {"groups": self._core.list_groups(self._now())}

    async def _list_nodes(self, scope: Scope, _: calls.Nothing) -> cv.Nodes:
        return {"nodes": self._nodes(scope)}

    def _nodes(self, scope: Scope) -> list[cv.NodeView]:
        views = self._core.list_nodes(scope)
        for view in views:
            memory = self._shell.agents.host_memory.get(view["node"])
            if memory is not None:
                view["host_ready_bytes"] = memory.ready_bytes
                view["host_prefault_bytes"] = memory.wanted_bytes
        return views

    # Jobs and deployments

    async def _submit_job(self, scope: Scope, call: calls.SubmitJob) -> vt.JobView:
        if scope is None:
            raise InvalidRequestError("a job is submitted for one tenant: name it")
        if scope not in self._core.tenants():
            raise NotFoundError(f"there is no tenant {scope!r}: create it first")
        await self._shell.request(
            ev.JobSubmitted(
                job=call.job,
                tenant=scope,
                name=call.name,
                controller_timeout_s=call.controller_timeout_s,
                reattach_timeout_s=call.reattach_timeout_s,
                priority=call.priority,
                gang=call.gang,
                expected_s=call.expected_s,
                slo=call.slo,
                controller=call.controller,
                user=call.user,
                halts_on_failure=True,
                quote=call.quote,
                fork=call.fork,
            )
        )
        return self._core.job_view(call.job, self._now())

    async def _change_job(
        self, scope: Scope, event: ev.JobFinished | ev.ControllerSeen | ev.ControllerAttached
    ) -> vt.JobView:
        self._check_job(scope, event.job)
        await self._shell.request(event)
        return self._core.job_view(event.job, self._now())

    async def _change_job_keys(
        self, scope: Scope, event: ev.JobKeyAdded | ev.JobKeysRevoked
    ) -> cv.EmptyView:
        self._check_job(scope, event.job)
        await self._shell.request(event)
        return {}

    async def _heartbeat(self, scope: Scope, event: ev.ControllerSeen) -> vt.HeartbeatView:
        view = await self._change_job(scope, event)
        return {**view, "lost_payloads": self._core.lost_payloads(event.job)}

    async def _list_jobs(self, scope: Scope, _: calls.Nothing) -> vt.Jobs:
        return {"jobs": self._core.list_jobs(scope, self._now())}

    async def _get_job(self, scope: Scope, call: calls.OneJob) -> vt.JobView:
        self._check_job(scope, call.job)
        return self._core.job_view(call.job, self._now())

    async def _explain_job(self, scope: Scope, call: calls.OneJob) -> vt.ExplainedJobView:
        self._check_job(scope, call.job)
        view = self._core.explain_job(call.job, self._now(), sees_all=scope is None)
        held = self._shell.outage.error
        if held is not None and not JobState(view["state"]).is_final:
            # The message may name paths, which are for operators.
            view["summary"] = (
                f"the scheduler's storage takes no new work ({held.code}), so requests and "
                f"results are held until that ends; before, {view['summary']}"
            )
        return view

    async def _create_deployment(
        self, scope: Scope, event: ev.DeploymentCreated
    ) -> vt.DeploymentView:
        self._check_job(scope, event.job)
        if event.deployment.rpartition("/")[0] != event.job:
            raise InvalidRequestError(
                f"a deployment of job {event.job!r} is named '{event.job}/<name>', "
                f"not {event.deployment!r}"
            )
        await self._shell.request(event)
        return self._core.deployment_view(event.deployment, self._now())

    async def _change_deployment(
        self, scope: Scope, event: ev.DeploymentRelaid | ev.DeploymentEnded
    ) -> vt.DeploymentView:
        self._check_deployment(scope, event.deployment)
        await self._shell.request(event)
        return self._core.deployment_view(event.deployment, self._now())

    async def _get_deployment(self, scope: Scope, call: calls.OneDeployment) -> vt.DeploymentView:
        self._check_deployment(scope, call.deployment)
        return self._core.deployment_view(call.deployment, self._now())

    # Operations

    async def _submit_operation(
        self, scope: Scope, event: ev.OperationSubmitted
    ) -> vt.OperationView:
        self._check_deployment(scope, event.deployment)
        if event.source is not None:
            self._check_deployment(scope, event.source)
        await self._shell.request(event)
        return self._core.operation_view(event.operation, self._now(), sees_all=scope is None)

    async def _cancel_operation(
        self, scope: Scope, event: ev.OperationCancelled
    ) -> vt.OperationView:
        self._check_operation(scope, event.operation)
        await self._shell.request(event)
        return self._core.operation_view(event.operation, self._now(), sees_all=scope is None)

    async def _acknowledge(self, scope: Scope, event: ev.FailureAcknowledged) -> vt.FailureView:
        if event.operation is not None:
            self._check_operation(scope, event.operation)
        if event.deployment is not None:
            self._check_deployment(scope, event.deployment)
        await self._shell.request(event)
        if event.operation is not None:
            job = self._core.operation_view(event.operation, self._now())["job"]
        else:
            assert event.deployment is not None, "the event was taken"
            job = self._core.deployment_view(event.deployment, self._now())["job"]
        return {"failure": self._core.job_view(job, self._now())["failure"]}

    async def _wait_operation(self, scope: Scope, call: calls.WaitOperation) -> vt.OperationView:
        self._check_operation(scope, call.operation)
        if call.timeout_s > 0:
            await self._shell.wait_final(call.operation, min(call.timeout_s, WAIT_S_MAX))
        return self._core.operation_view(call.operation, self._now(), sees_all=scope is None)

    async def _list_operations(self, scope: Scope, call: calls.ListOperations) -> vt.Operations:
        limit = max(1, min(call.limit, LOG_PAGE_MAX))
        wanted = replace(call, after=max(0, call.after), limit=limit)
        return {"operations": operation_log(self._core.cluster, scope, wanted, self._now())}

    async def _operation_finished(self, event: OperationFinished) -> cv.EmptyView:
        await self._shell.report(calls.with_plain_error(event))
        return {}

    async def _operation_failed(self, event: OperationFailed) -> cv.EmptyView:
        await self._shell.report(calls.with_plain_error(event))
        return {}

    # Queries to nodes

    async def _read_log(self, scope: Scope, call: ReadLog) -> JobLogs:
        """The logs of the job's deployments, and in `failed` the nodes that sent none."""
        self._check_job(scope, call.job)
        job = self._core.job_view(call.job, self._now())
        queries = [
            msgspec.structs.replace(call, deployment=view["deployment"])
            for view in job["deployments"]
            if call.deployment in (None, view["deployment"], view["deployment"].split("/")[-1])
        ]
        answers, failed = await self._query_nodes(queries, Logs)
        return {"logs": [log for answer in answers for log in answer["logs"]], "failed": failed}

    async def _list_checkpoints(self, scope: Scope, call: ListCheckpoints) -> JobCheckpoints:
        """The job's checkpoints, and in `failed` the nodes that did not answer."""
        self._check_job(scope, call.job)
        answers, failed = await self._query_nodes([call], Checkpoints)
        found = [report for answer in answers for report in answer["checkpoints"]]
        return {"checkpoints": _newest_reports(found), "failed": failed}

    async def _query_nodes(
        self, queries: Sequence[ReadLog | ListCheckpoints], kind: type[AnswerT]
    ) -> tuple[list[AnswerT], list[SilentNodeView]]:
        """(all nodes' answers, the nodes that sent none).

        A node whose agent is being restarted sends none, and may have what is asked for.
        """
        links = self._shell.agents.connected()
        async with asyncio.TaskGroup() as tasks:
            asked = [
                (link.node, tasks.create_task(_query_node(link, query, kind)))
                for query in queries
                for link in links
            ]
        found: list[AnswerT] = []
        connected = {link.node for link in links}
        failed = {
            node: "its agent is not connected"
            for node in expected_nodes(self._core.cluster, self._now())
            if queries and node not in connected
        }
        for node, task in asked:
            answer = task.result()
            if isinstance(answer, PlexRLError):
                failed[node] = answer.message
            else:
                found.append(answer)
        return found, [{"node": node, "reason": reason} for node, reason in failed.items()]

    # Access checks: another tenant's object is answered like one that does not exist.

    def _now(self) -> float:
        return self._shell.clock.now()

    def _check_job(self, scope: Scope, job: JobId) -> None:
        if scope not in (None, self._core.tenant_of_job(job)):
            raise unknown_job(job)

    def _check_deployment(self, scope: Scope, deployment: DeploymentId) -> None:
        if scope not in (None, self._core.tenant_of_deployment(deployment)):
            raise unknown_deployment(deployment)

    def _check_operation(self, scope: Scope, operation: OperationId) -> None:
        if scope not in (None, self._core.tenant_of_operation(operation)):
            raise unknown_operation(operation)


async def _query_node(
    link: AgentLink, query: ReadLog | ListCheckpoints, kind: type[AnswerT]
) -> AnswerT | PlexRLError:
    """One node's answer, or the error."""
    try:
        answer = await link.peer.ask(query, timeout_s=QUERY_NODE_TIMEOUT_S)
        return msgspec.convert(answer, kind)
    except PlexRLError as error:
        return error
    except msgspec.ValidationError:
        return UnavailableError("its answer is malformed")


def _newest_reports(reports: Iterable[CheckpointView]) -> list[CheckpointView]:
    """The newest report on each checkpoint, sorted by name.

    The writing node reports progress; the other nodes report the files on the shared disk.
    """
    newest: dict[str, CheckpointView] = {}
    for report in reports:
        name = report["name"]
        if name not in newest or report["as_of"] > newest[name]["as_of"]:
            newest[name] = report
    return [newest[name] for name in sorted(newest)]
