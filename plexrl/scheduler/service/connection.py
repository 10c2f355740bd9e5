"""One connection of the scheduler's socket: the peer's role and the calls it may make.

The first call is `hello`, which names the role; all other calls are refused before it. A router
makes requests for its callers and reports results of operations. A node agent reports on the
workers of its own node.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PlexRLError,
    UnavailableError,
    UnknownDeploymentError,
)
from plexrl.ids import DeploymentId, JobId, NodeId, OperationId, RouterId
from plexrl.scheduler.core import calls
from plexrl.scheduler.core.calls import Answer, Ask, Plain, Report, Scope
from plexrl.scheduler.core.lookups import unknown_deployment, unknown_job, unknown_operation
from plexrl.scheduler.core.queries.checkpoint_reports import merged
from plexrl.scheduler.service.links import AgentLink
from plexrl.scheduler.service.shell import Shell
from plexrl.scheduler.service.tenant_calls import TenantCalls, check_operator
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.rpc import Handler, Peer

WAIT_S_MAX = 120.0
LOG_PAGE_MAX = 1000
QUERY_NODE_TIMEOUT_S = 10.0
GREETING_S = 5.0
"""Longest wait for the greeting's event before the greeting is answered."""


class Owner(Protocol):
    """The service, which outlives the connections."""

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background, at most as long as the service lives."""
        ...

    def node_connected(self, node: NodeId) -> None:
        """A node's agent has connected."""
        ...

    def node_disconnected(self, node: NodeId) -> None:
        """The last connection of a node's agent has ended."""
        ...

    def router_disconnected(self, router: RouterId) -> None:
        """The last connection of a router has ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Greeted:
    """The peer after its hello."""

    role: str
    router: RouterId | None = None
    link: AgentLink | None = None
    sending: asyncio.Task[None] | None = None


class Connection:
    """One connection, from its first call to its end."""

    def __init__(self, owner: Owner, shell: Shell) -> None:
        self._owner = owner
        self._shell = shell
        self._greeted: _Greeted | None = None
        self._router_calls = RouterCalls(shell, TenantCalls(shell, owner.keep))
        self._agent_calls = AgentCalls(shell)

    def handlers(self) -> dict[str, Handler]:
        """The handlers of all methods that peers may call."""
        return {
            "hello": self._hello,
            **{
                name: self._request(name, ask)
                for name, ask in self._router_calls.requests().items()
            },
            **{
                name: self._report(name, "router", report)
                for name, report in self._router_calls.reports().items()
            },
            **{
                name: self._report(name, "agent", report)
                for name, report in self._agent_calls.reports().items()
            },
        }

    def ended(self, peer: Peer) -> None:
        """The connection is over."""
        greeted = self._greeted
        if greeted is None:
            return
        if greeted.sending is not None:
            greeted.sending.cancel()
        if greeted.router is not None and self._shell.routers.remove(greeted.router, peer):
            self._owner.router_disconnected(greeted.router)
        if greeted.link is not None and self._shell.agents.remove(greeted.link):
            self._owner.node_disconnected(greeted.link.node)

    async def _hello(self, peer: Peer, params: Plain) -> Plain:
        if self._greeted is not None:
            raise ConflictError(f"this connection said hello before, as {self._greeted.role}")
        rest = dict(params)
        role = rest.pop("role", None)
        # The role is set before the first await, because pipelined calls check it.
        if role == "router":
            await self._hello_router(peer, calls.parse(calls.RouterHello, rest).router)
        elif role == "agent":
            await self._hello_agent(peer, calls.parse(ev.NodeJoined, rest))
        else:
            raise InvalidRequestError(f"role {role!r} is unknown: say router or agent")
        return {}

    async def _hello_router(self, peer: Peer, router: RouterId) -> None:
        self._greeted = _Greeted("router", router=router)
        self._shell.routers.add(router, peer)
        await self._report_greeting(ev.RouterJoined(router=router))
        await self._shell.routers.flush()

    async def _report_greeting(self, event: ev.Event) -> None:
        """Report a greeting's event; during an outage of the journal, do not wait for it."""
        taking = self._owner.keep(self._shell.report(event))
        await asyncio.wait({taking}, timeout=GREETING_S)
        if taking.done():
            taking.result()

    async def _hello_agent(self, peer: Peer, joined: ev.NodeJoined) -> None:
        link = self._shell.agents.add(joined.node, peer)
        self._greeted = _Greeted("agent", link=link, sending=self._owner.keep(link.run()))
        self._agent_calls.node = joined.node
        self._owner.node_connected(joined.node)
        await self._report_greeting(joined)

    def _check_role(self, name: str, role: str) -> None:
        if self._greeted is None:
            raise PermissionDeniedError(f"say hello before {name!r}")
        if self._greeted.role != role:
            raise PermissionDeniedError(
                f"{name!r} is for a connection that said hello as {role}, this one is of a "
                f"{self._greeted.role}"
            )

    def _request(self, name: str, ask: Ask) -> Handler:
        kind, answer = ask

        async def handler(_: Peer, params: Plain) -> Answer:
            self._check_role(name, "router")
            await self._shell.wait_until_consistent()
            scope, rest = calls.take_scope(params)
            controller, rest = calls.take_controller(kind, rest)
            call = calls.parse(kind, rest)
            if controller and not isinstance(call, ev.Event | calls.SubmitJob):
                self._shell.core.check_controller(controller, scope, **calls.subject(call))
            return await answer(scope, call)

        return handler

    def _report(self, name: str, role: str, report: Report) -> Handler:
        kind, take = report

        async def handler(_: Peer, params: Plain) -> Answer:
            self._check_role(name, role)
            await self._shell.wait_until_consistent()
            return await take(calls.parse(kind, params))

        return handler


class RouterCalls:
    """Calls of routers."""

    def __init__(self, shell: Shell, tenants: TenantCalls) -> None:
        self._shell = shell
        self._core = shell.core
        self._tenants = tenants

    def requests(self) -> dict[str, Ask]:
        """Calls on behalf of a tenant or an operator."""
        return {
            **self._tenants.requests(),
            "list_usage": (calls.Nothing, self._list_usage),
            "drain_node": (ev.NodeDrainChanged, self._drain_node),
            "explain_job": (calls.OneJob, self._explain_job),
            "submit_job": (calls.SubmitJob, self._submit_job),
            "finish_job": (ev.JobFinished, self._change_job),
            "heartbeat": (ev.ControllerSeen, self._change_job),
            "attach_job": (ev.ControllerAttached, self._change_job),
            "acknowledge": (ev.FailureAcknowledged, self._acknowledge),
            "list_jobs": (calls.Nothing, self._list_jobs),
            "get_job": (calls.OneJob, self._get_job),
            "create_deployment": (ev.DeploymentCreated, self._create_deployment),
            "get_deployment": (calls.OneDeployment, self._get_deployment),
            "submit_operation": (ev.OperationSubmitted, self._submit_operation),
            "cancel_operation": (ev.OperationCancelled, self._cancel_operation),
            "wait_operation": (calls.WaitOperation, self._wait_operation),
            "list_operations": (calls.ListOperations, self._list_operations),
            "list_nodes": (calls.Nothing, self._list_nodes),
            "list_groups": (calls.Nothing, self._list_groups),
            "status": (calls.Nothing, self._status),
            "read_log": (calls.ReadLog, self._read_log),
            "list_checkpoints": (calls.ListCheckpoints, self._list_checkpoints),
        }

    def reports(self) -> dict[str, Report]:
        """Calls of the router itself."""
        return {
            **self._tenants.reports(),
            "conditions": (calls.Nothing, self._conditions),
            "needless_payloads": (calls.NeedlessPayloads, self._unreferenced_payloads),
            "operation_finished": (ev.OperationFinished, self._operation_finished),
            "operation_failed": (ev.OperationFailed, self._operation_failed),
        }

    # The cluster

    async def _conditions(self, _: calls.Nothing) -> Plain:
        """The conditions that stop work: outages, bugs, and deployments that wait for memory."""
        conditions = [*self._shell.outage.conditions.view(), *self._shell.fault_conditions.view()]
        if held := self._core.held_deployments():
            reasons = "; ".join(f"{each['deployment']}: {each['message']}" for each in held[:10])
            message = f"{len(held)} deployments wait for memory: {reasons}"
            since = min(each["since"] for each in held)
            conditions.append({"code": "deployments_held", "message": message, "since": since})
        return {"conditions": conditions}

    async def _unreferenced_payloads(self, call: calls.NeedlessPayloads) -> Plain:
        # A leader that was replaced unnoticed would miss operations accepted since.
        await self._shell.confirm_lead()
        return {"blobs": self._core.unreferenced_payloads(call.blobs)}

    async def _list_usage(self, scope: Scope, _: calls.Nothing) -> Plain:
        sharing = self._core.sharing(scope, self._now())
        return {"usage": self._core.usage(scope), "sharing": sharing}

    async def _drain_node(self, scope: Scope, event: ev.NodeDrainChanged) -> Answer:
        check_operator(scope)
        await self._shell.request(event)
        (view,) = [each for each in self._core.list_nodes() if each["node"] == event.node]
        return view

    async def _list_groups(self, scope: Scope, _: calls.Nothing) -> Plain:
        check_operator(scope)
        return {"groups": self._core.list_groups(self._now())}

    async def _list_nodes(self, scope: Scope, _: calls.Nothing) -> Plain:
        return {"nodes": self._core.list_nodes(scope)}

    async def _status(self, scope: Scope, _: calls.Nothing) -> Answer:
        view = self._core.status(self._now(), scope)
        return view if scope is not None else {**view, **self._shell.faults()}

    # Jobs and deployments

    async def _submit_job(self, scope: Scope, call: calls.SubmitJob) -> Answer:
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
                controller=call.controller,
                halts_on_failure=True,
            )
        )
        return self._core.job_view(call.job, self._now())

    async def _change_job(
        self, scope: Scope, event: ev.JobFinished | ev.ControllerSeen | ev.ControllerAttached
    ) -> Answer:
        self._check_job(scope, event.job)
        await self._shell.request(event)
        return self._core.job_view(event.job, self._now())

    async def _list_jobs(self, scope: Scope, _: calls.Nothing) -> Plain:
        return {"jobs": self._core.list_jobs(scope, self._now())}

    async def _get_job(self, scope: Scope, call: calls.OneJob) -> Answer:
        self._check_job(scope, call.job)
        return self._core.job_view(call.job, self._now())

    async def _explain_job(self, scope: Scope, call: calls.OneJob) -> Answer:
        self._check_job(scope, call.job)
        return self._core.explain_job(call.job, self._now(), sees_all=scope is None)

    async def _create_deployment(self, scope: Scope, event: ev.DeploymentCreated) -> Answer:
        self._check_job(scope, event.job)
        if event.deployment.rpartition("/")[0] != event.job:
            raise InvalidRequestError(
                f"a deployment of job {event.job!r} is named '{event.job}/<name>', "
                f"not {event.deployment!r}"
            )
        await self._shell.request(event)
        return self._core.deployment_view(event.deployment, self._now())

    async def _get_deployment(self, scope: Scope, call: calls.OneDeployment) -> Answer:
        self._check_deployment(scope, call.deployment)
        return self._core.deployment_view(call.deployment, self._now())

    # Operations

    async def _submit_operation(self, scope: Scope, event: ev.OperationSubmitted) -> Answer:
        self._check_deployment(scope, event.deployment)
        if event.source is not None:
            self._check_deployment(scope, event.source)
        await self._shell.request(event)
        return self._core.operation_view(event.operation, self._now())

    async def _cancel_operation(self, scope: Scope, event: ev.OperationCancelled) -> Answer:
        self._check_operation(scope, event.operation)
        await self._shell.request(event)
        return self._core.operation_view(event.operation, self._now())

    async def _acknowledge(self, scope: Scope, event: ev.FailureAcknowledged) -> Plain:
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

    async def _wait_operation(self, scope: Scope, call: calls.WaitOperation) -> Answer:
        self._check_operation(scope, call.operation)
        if call.timeout_s > 0:
            await self._shell.wait_final(call.operation, min(call.timeout_s, WAIT_S_MAX))
        return self._core.operation_view(call.operation, self._now())

    async def _list_operations(self, scope: Scope, call: calls.ListOperations) -> Plain:
        limit = max(1, min(call.limit, LOG_PAGE_MAX))
        wanted = replace(call, after=max(0, call.after), limit=limit)
        return {"operations": self._core.operation_log(scope, wanted, self._now())}

    async def _operation_finished(self, event: ev.OperationFinished) -> Plain:
        await self._shell.report(event)
        return {}

    async def _operation_failed(self, event: ev.OperationFailed) -> Plain:
        await self._shell.report(calls.with_readable_error(event))
        return {}

    # Queries to nodes

    async def _read_log(self, scope: Scope, call: calls.ReadLog) -> Plain:
        """The logs of the job's deployments, and in `failed` the nodes that sent none."""
        self._check_job(scope, call.job)
        job = self._core.job_view(call.job, self._now())
        names = [
            view["deployment"]
            for view in job["deployments"]
            if call.deployment in (None, view["deployment"], view["deployment"].split("/")[-1])
        ]
        queries = [{"deployment": name, "lines": call.lines} for name in names]
        logs, failed = await self._query_nodes("read_log", queries, "logs")
        return {"logs": logs, "failed": failed}

    async def _list_checkpoints(self, scope: Scope, call: calls.ListCheckpoints) -> Plain:
        """The job's checkpoints, and in `failed` the nodes that did not answer."""
        self._check_job(scope, call.job)
        queries = [{"job": call.job}]
        found, failed = await self._query_nodes("list_checkpoints", queries, "checkpoints")
        return {"checkpoints": merged(found), "failed": failed}

    async def _query_nodes(
        self, method: str, queries: Sequence[Plain], wanted: str
    ) -> tuple[list[Plain], list[Plain]]:
        """(the merged lists under key `wanted` of all nodes' answers, the nodes that sent none)."""
        links = self._shell.agents.connected()
        async with asyncio.TaskGroup() as tasks:
            asked = [
                (link.node, tasks.create_task(_query_node(link, method, query, wanted)))
                for query in queries
                for link in links
            ]
        found: list[Plain] = []
        failed: dict[str, str] = {}
        for node, task in asked:
            answer = task.result()
            if isinstance(answer, PlexRLError):
                failed[node] = answer.message
            else:
                found += answer
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


class AgentCalls:
    """Calls of a node agent about the workers of its node."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._core = shell.core
        self.node: NodeId | None = None
        """Set by the hello."""

    def reports(self) -> dict[str, Report]:
        """Calls of the agent."""
        return {
            "worker_ready": (ev.WorkerReady, self._worker_ready),
            "worker_exited": (ev.WorkerExited, self._worker_exited),
            "state_reported": (ev.StateReported, self._state_reported),
        }

    async def _worker_ready(self, event: ev.WorkerReady) -> Plain:
        if not self._is_current(event):
            return {"wanted": False}
        await self._shell.report(event)
        return {"wanted": self._is_current(event)}

    async def _worker_exited(self, event: ev.WorkerExited) -> Plain:
        if self._is_current(event):
            await self._shell.report(event)
        return {}

    async def _state_reported(self, event: ev.StateReported) -> Plain:
        if event.node != self.node:
            raise PermissionDeniedError(f"this is not the agent of node {event.node!r}")
        await self._shell.report(event)
        return {}

    def _is_current(self, event: ev.WorkerReady | ev.WorkerExited) -> bool:
        """Whether the report is about a worker that the core currently wants.

        Raises:
            PermissionDeniedError: the core wants the worker on another node.
        """
        try:
            view = self._core.deployment_view(event.deployment, self._shell.clock.now())
        except UnknownDeploymentError:
            return False
        if view["incarnation"] != event.incarnation or view["state"] == "stopped":
            return False
        node = {rank["rank"]: rank["node"] for rank in view["ranks"]}.get(event.rank)
        if node != self.node:
            raise PermissionDeniedError(
                f"rank {event.rank} of {event.deployment!r} is no worker of node {self.node!r}"
            )
        return True


async def _query_node(
    link: AgentLink, method: str, params: Plain, wanted: str
) -> list[Plain] | PlexRLError:
    """One node's list, or the error."""
    try:
        answer = await link.peer.call(method, params, timeout_s=QUERY_NODE_TIMEOUT_S)
    except PlexRLError as error:
        return error
    found = answer.get(wanted)
    if not isinstance(found, list):
        return UnavailableError("its answer is malformed")
    return found
