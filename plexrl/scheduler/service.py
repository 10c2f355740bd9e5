"""The scheduler's socket: what routers ask, what node agents report."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from plexrl.cluster.process import remove_socket
from plexrl.errors import (
    InvalidRequestError,
    NotFoundError,
    UnknownDeploymentError,
    UnknownJobError,
    UnknownOperationError,
)
from plexrl.ids import DeploymentId, JobId, NodeId, OperationId, RouterId, TenantId
from plexrl.scheduler import events as ev
from plexrl.scheduler.config import SchedulerConfig, core_settings
from plexrl.scheduler.shell import Shell
from plexrl.wire.rpc import Handler, Peer

if TYPE_CHECKING:
    from plexrl.scheduler.links import AgentLink

LOG = logging.getLogger(__name__)

OPERATOR = TenantId("operator")
WAIT_S_MAX = 120.0
LOG_PAGE_MAX = 1000
Plain = dict[str, Any]


class Service:
    """Serves routers and agents over one Unix socket."""

    def __init__(self, config: SchedulerConfig, shell: Shell) -> None:
        self._config = config
        self.shell = shell
        self._core = shell.core
        self._background: set[asyncio.Task[None]] = set()

    async def run(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Serve until `stop`; `ready` is called once the socket listens.

        Raises:
            LeaseLostError: another scheduler leads; nothing was tidied up.
            StorageError: the journal does not take even the first events.
        """
        runner = asyncio.create_task(self.shell.run())
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._begin()
            remove_socket(self._config.listen)
            server = await asyncio.start_unix_server(
                self._connected, self._config.listen, backlog=1024
            )
            self._expect_nodes()
            ready()
            await asyncio.wait({runner, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if runner.done():
                # By a lost lease, after which nobody must be told anything; or by a bug of ours.
                runner.result()
            server.close()
            for task in list(self._background):
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            remove_socket(self._config.listen)
        finally:
            stopping.cancel()
            runner.cancel()
            await asyncio.gather(runner, stopping, return_exceptions=True)

    async def _begin(self) -> None:
        # Requests, not reports: a journal that is full says so instead of keeping us waiting.
        settings = msgspec.json.encode(core_settings(self._config)).decode()
        await self.shell.request(ev.SchedulerStarted(settings_json=settings))
        known = set(self._core.tenants())
        created = [(OPERATOR, self._config.operator_key_digest, True)] + [
            (TenantId(name), digest, False) for name, digest in self._config.tenants
        ]
        for tenant, digest, is_operator in created:
            if tenant not in known:
                await self.shell.request(
                    ev.TenantCreated(tenant=tenant, key_digest=digest, is_operator=is_operator)
                )

    def _expect_nodes(self) -> None:
        """Nodes of before the restart have the usual grace to come back."""
        for view in self._core.list_nodes():
            self._in_background(self._lose_unless_back(NodeId(view["node"])))

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self)
        peer = Peer(reader, writer, connection.handlers())
        task = asyncio.current_task()
        assert task is not None
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        try:
            await peer.run()
        finally:
            connection.ended(peer)

    async def _lose_unless_back(self, node: NodeId) -> None:
        await asyncio.sleep(self._config.node_grace_s)
        if not self.shell.agents.is_connected(node):
            await self.shell.report(ev.NodeLost(node=node))

    def node_gone(self, node: NodeId) -> None:
        """An agent's connection ended."""
        self._in_background(self._lose_unless_back(node))

    def router_gone(self, router: RouterId) -> None:
        """A router's connection ended."""
        self._in_background(self.shell.report(ev.RouterLost(router=router)))

    def keep(self, work: Awaitable[None]) -> None:
        """Run `work` while the service does."""
        self._in_background(work)


class _Connection:
    """One connection; its first call says who is there."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._shell = service.shell
        self._core = service.shell.core
        self._router: RouterId | None = None
        self._link: AgentLink | None = None

    def handlers(self) -> dict[str, Handler]:
        """The methods of the contract between the scheduler and its peers."""
        names = (
            *("hello", "authenticate", "create_tenant", "list_tenants", "submit_job"),
            *("finish_job", "heartbeat", "create_deployment", "submit_operation"),
            *("cancel_operation", "wait_operation", "get_deployment", "operation_finished"),
            *("operation_failed", "list_jobs", "get_job", "list_nodes", "list_groups"),
            *("list_operations", "status", "read_log", "worker_ready", "worker_exited"),
        )
        return {name: _checked(getattr(self, f"_{name}")) for name in names}

    def ended(self, peer: Peer) -> None:
        """The connection is over."""
        if self._router is not None and self._shell.routers.remove(self._router, peer):
            self._service.router_gone(self._router)
        if self._link is not None and self._shell.agents.remove(self._link):
            self._service.node_gone(self._link.node)

    # Who is there

    async def _hello(self, peer: Peer, params: Plain) -> Plain:
        role = params.pop("role")
        if role == "router":
            self._router = RouterId(params["router"])
            self._shell.routers.add(self._router, peer)
            await self._shell.report(ev.RouterJoined(router=self._router))
            await self._shell.routers.flush()
        elif role == "agent":
            joined = msgspec.convert(params, ev.NodeJoined)
            self._link = self._shell.agents.add(joined.node, peer)
            self._service.keep(self._link.run())
            await self._shell.report(joined)
        else:
            raise InvalidRequestError(f"role {role!r} is unknown: say router or agent")
        return {}

    # From routers

    async def _authenticate(self, peer: Peer, params: Plain) -> Plain:
        del peer
        tenant, is_operator = self._core.authenticate(params["key_digest"])
        return {"tenant": tenant, "is_operator": is_operator}

    async def _create_tenant(self, peer: Peer, params: Plain) -> Plain:
        del peer
        await self._shell.request(msgspec.convert(params, ev.TenantCreated))
        return {}

    async def _list_tenants(self, peer: Peer, params: Plain) -> Plain:
        del peer, params
        return {"tenants": list(self._core.tenants())}

    async def _submit_job(self, peer: Peer, params: Plain) -> Plain:
        del peer
        if params["tenant"] not in self._core.tenants():
            raise NotFoundError(f"there is no tenant {params['tenant']!r}: create it first")
        event = msgspec.convert(params, ev.JobSubmitted)
        await self._shell.request(event)
        return self._core.job_view(event.job, self._now())

    async def _finish_job(self, peer: Peer, params: Plain) -> Plain:
        del peer
        job = self._own_job(params)
        await self._shell.request(
            ev.JobFinished(job=job, outcome=params["outcome"], reason=params.get("reason", ""))
        )
        return self._core.job_view(job, self._now())

    async def _heartbeat(self, peer: Peer, params: Plain) -> Plain:
        del peer
        job = self._own_job(params)
        await self._shell.request(ev.ControllerSeen(job=job))
        return self._core.job_view(job, self._now())

    async def _create_deployment(self, peer: Peer, params: Plain) -> Plain:
        del peer
        self._own_job(params)
        params.pop("tenant")
        event = msgspec.convert(params, ev.DeploymentCreated)
        await self._shell.request(event)
        return self._core.deployment_view(event.deployment, self._now())

    async def _submit_operation(self, peer: Peer, params: Plain) -> Plain:
        del peer
        self._own_deployment(params)
        params.pop("tenant")
        event = msgspec.convert(params, ev.OperationSubmitted)
        await self._shell.request(event)
        return self._core.operation_view(event.operation, self._now())

    async def _cancel_operation(self, peer: Peer, params: Plain) -> Plain:
        del peer
        operation = self._own_operation(params)
        await self._shell.request(ev.OperationCancelled(operation=operation))
        return self._core.operation_view(operation, self._now())

    async def _wait_operation(self, peer: Peer, params: Plain) -> Plain:
        del peer
        operation = self._own_operation(params)
        timeout_s = float(params["timeout_s"])
        if timeout_s > 0:
            await self._shell.wait_final(operation, min(timeout_s, WAIT_S_MAX))
        return self._core.operation_view(operation, self._now())

    async def _get_deployment(self, peer: Peer, params: Plain) -> Plain:
        del peer
        return self._core.deployment_view(self._own_deployment(params), self._now())

    async def _operation_finished(self, peer: Peer, params: Plain) -> Plain:
        del peer
        await self._shell.report(msgspec.convert(params, ev.OperationFinished))
        return {}

    async def _operation_failed(self, peer: Peer, params: Plain) -> Plain:
        del peer
        event = msgspec.convert(params, ev.OperationFailed)
        _check_object("error_json", event.error_json)
        await self._shell.report(event)
        return {}

    async def _list_jobs(self, peer: Peer, params: Plain) -> Plain:
        del peer
        return {"jobs": self._core.list_jobs(params.get("tenant"), self._now())}

    async def _get_job(self, peer: Peer, params: Plain) -> Plain:
        del peer
        return self._core.job_view(self._own_job(params), self._now())

    async def _list_nodes(self, peer: Peer, params: Plain) -> Plain:
        del peer, params
        return {"nodes": self._core.list_nodes()}

    async def _list_groups(self, peer: Peer, params: Plain) -> Plain:
        del peer, params
        return {"groups": self._core.list_groups(self._now())}

    async def _list_operations(self, peer: Peer, params: Plain) -> Plain:
        del peer
        rows = self._core.operation_log(
            params.get("tenant"),
            params.get("job"),
            int(params.get("after", 0)),
            min(int(params.get("limit", LOG_PAGE_MAX)), LOG_PAGE_MAX),
            self._now(),
        )
        return {"operations": rows}

    async def _status(self, peer: Peer, params: Plain) -> Plain:
        del peer, params
        return self._core.status(self._now())

    async def _read_log(self, peer: Peer, params: Plain) -> Plain:
        del peer
        job = self._core.job_view(self._own_job(params), self._now())
        wanted = params.get("deployment")
        logs: list[Plain] = []
        for deployment in job["deployments"]:
            name = deployment["deployment"]
            if wanted is not None and wanted not in (name, name.rsplit("/", 1)[-1]):
                continue
            call = {"deployment": name, "lines": int(params.get("lines", 100))}
            for link in self._shell.agents.connected():
                answer = await link.peer.call("read_log", call, timeout_s=10.0)
                logs += answer["logs"]
        return {"logs": logs}

    # From node agents

    async def _worker_ready(self, peer: Peer, params: Plain) -> Plain:
        del peer
        event = msgspec.convert(params, ev.WorkerReady)
        await self._shell.report(event)
        try:
            view = self._core.deployment_view(event.deployment, self._now())
        except UnknownDeploymentError:
            return {"wanted": False}
        current = view["incarnation"] == event.incarnation and view["state"] != "stopped"
        return {"wanted": current}

    async def _worker_exited(self, peer: Peer, params: Plain) -> Plain:
        del peer
        await self._shell.report(msgspec.convert(params, ev.WorkerExited))
        return {}

    # Whose is it? Another tenant's object is answered like one that does not exist.

    def _now(self) -> float:
        return self._shell.clock.now()

    def _own_job(self, params: Plain) -> JobId:
        job, tenant = JobId(params["job"]), params.get("tenant")
        view = self._core.job_view(job, self._now())
        if tenant not in (None, view["tenant"]):
            raise UnknownJobError(f"there is no job {job!r}")
        return job

    def _own_deployment(self, params: Plain) -> DeploymentId:
        deployment, tenant = DeploymentId(params["deployment"]), params.get("tenant")
        view = self._core.deployment_view(deployment, self._now())
        owner = self._core.job_view(JobId(view["job"]), self._now())["tenant"]
        if tenant not in (None, owner):
            raise UnknownDeploymentError(f"there is no deployment {deployment!r}")
        return deployment

    def _own_operation(self, params: Plain) -> OperationId:
        operation, tenant = OperationId(params["operation"]), params.get("tenant")
        view = self._core.operation_view(operation, self._now())
        if tenant not in (None, view["tenant"]):
            raise UnknownOperationError(f"there is no operation {operation!r}, or not any more")
        return operation


def _check_object(name: str, text: str) -> None:
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON object: {error}") from error


def _checked(handler: Handler) -> Handler:
    """`handler`, with malformed parameters answered as the caller's fault."""

    async def call(peer: Peer, params: Plain) -> Plain | None:
        try:
            return await handler(peer, params)
        except (KeyError, TypeError, ValueError) as error:
            # msgspec.ValidationError is a ValueError.
            raise InvalidRequestError(f"malformed call: {error!r}") from error

    return call
