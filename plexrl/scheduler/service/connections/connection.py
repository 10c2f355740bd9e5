"""One connection to the scheduler: the peer's role and the calls it may make.

The first call is `hello`, which names the role; all other calls are refused before it. A process of
another machine can only say what its certificate says. A router
makes requests for its callers and reports results of operations. A node agent reports on the
workers of its own node.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    PermissionDeniedError,
)
from plexrl.ids import NodeId, RouterId
from plexrl.scheduler.queries.views import live_workers
from plexrl.scheduler.service.connections.agent_calls import AgentCalls
from plexrl.scheduler.service.connections.links import AgentLink
from plexrl.scheduler.service.connections.overview_calls import OverviewCalls
from plexrl.scheduler.service.connections.router_calls import RouterCalls
from plexrl.scheduler.service.connections.tenant_calls import TenantCalls
from plexrl.scheduler.service.shell import Shell
from plexrl.scheduler.state.messages import calls
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import Answer, Ask, Parameters, Report
from plexrl.scheduler.state.messages.earlier import upgrade_report
from plexrl.wire.links.credentials import LOCAL, Identity, Role
from plexrl.wire.messages.reports import (
    HELLOS,
    Beat,
    Heartbeat,
    LiveWorkers,
    NodeJoined,
    RouterJoined,
)
from plexrl.wire.rpc import Handler, Peer, read_message

LOG = logging.getLogger(__name__)

GREETING_S = 5.0
"""Longest wait for the greeting's event before the greeting is answered."""


class Owner(Protocol):
    """The service, which outlives the connections."""

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background, at most as long as the service lives."""
        ...

    def heartbeat(self, node: NodeId | None, crl_number: int | None) -> Heartbeat:
        """The answer to `hello` or a heartbeat of another machine's process; `node`: an agent's.
        `crl_number`: of its list of revoked certificates; None: it wants none."""
        ...

    def check_machine(self, node: NodeId, machine: str) -> None:
        """Raises `UnavailableError` if another machine still has the node's lease."""
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

    def __init__(self, owner: Owner, shell: Shell, identity: Identity) -> None:
        """`identity`: of the process at the other end."""
        self.identity = identity
        self.heard_at = asyncio.get_running_loop().time()
        """When it last sent `hello` or a heartbeat."""
        self._owner = owner
        self._shell = shell
        self._greeted: _Greeted | None = None
        self._router_calls = RouterCalls(shell, TenantCalls(shell, owner.keep))
        self._overview_calls = OverviewCalls(shell)
        self._agent_calls = AgentCalls(shell)

    def handlers(self) -> dict[str, Handler]:
        """The handlers of all methods that peers may call."""
        requests = {**self._router_calls.requests(), **self._overview_calls.requests()}
        return {
            "hello": self._hello,
            "beat": self._beat,
            **{name: self._request(name, ask) for name, ask in requests.items()},
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

    async def _hello(self, peer: Peer, params: Parameters) -> Heartbeat:
        if self._greeted is not None:
            raise ConflictError(f"this connection said hello before, as {self._greeted.role}")
        rest = dict(params)
        role = rest.pop("role", None)
        kind = HELLOS.get(role) if isinstance(role, str) else None
        if kind is None:
            raise InvalidRequestError(f"role {role!r} is unknown: say router or agent")
        joined = calls.parse(kind, rest)
        # The role is set before the first await, because pipelined calls check it.
        if isinstance(joined, RouterJoined):
            self._check_identity(peer, Identity(Role.ROUTER, joined.router))
            await self._hello_router(peer, joined)
        else:
            self._check_identity(peer, Identity(Role.NODE, joined.node))
            if self.identity != LOCAL:
                self._owner.check_machine(joined.node, joined.machine)
            await self._hello_agent(peer, joined)
        return self._heartbeat()

    def _check_identity(self, peer: Peer, claimed: Identity) -> None:
        """Refuse, and end the connection of, a process whose certificate says something else."""
        if self.identity in (LOCAL, claimed):
            return
        LOG.warning("%s said that it is %s; refused", self.identity, claimed)
        peer.close_after_answers()
        raise PermissionDeniedError(
            f"the certificate is that of {self.identity}, and the process says that it is "
            f"{claimed}: give it the certificate of {claimed}"
        )

    async def _beat(self, peer: Peer, params: Parameters) -> Heartbeat:
        del peer
        if self._greeted is None:
            raise PermissionDeniedError("say hello before 'beat'")
        return self._heartbeat(read_message(params, Beat).crl_number)

    def _heartbeat(self, crl_number: int | None = None) -> Heartbeat:
        """Take in a heartbeat. On a Unix socket there are none."""
        if self.identity == LOCAL:
            return {}
        assert self._greeted is not None, "hello was accepted"
        self.heard_at = asyncio.get_running_loop().time()
        link = self._greeted.link
        return self._owner.heartbeat(None if link is None else link.node, crl_number)

    async def _hello_router(self, peer: Peer, joined: RouterJoined) -> None:
        self._greeted = _Greeted("router", router=joined.router)
        self._shell.routers.add(joined.router, peer)
        await self._shell.wait_until_consistent()
        state = self._shell.core.cluster.state
        await peer.tell(LiveWorkers(incarnations=live_workers(state)))
        await self._report_greeting(joined)
        await self._shell.routers.flush()

    async def _report_greeting(self, event: ev.Event) -> None:
        """Report a greeting's event; during an outage of the journal, do not wait for it."""
        taking = self._owner.keep(self._shell.report(event))
        await asyncio.wait({taking}, timeout=GREETING_S)
        if taking.done():
            taking.result()

    async def _hello_agent(self, peer: Peer, joined: NodeJoined) -> None:
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

        async def handler(_: Peer, params: Parameters) -> Answer:
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

        async def handler(_: Peer, params: Parameters) -> Answer:
            self._check_role(name, role)
            await self._shell.wait_until_consistent()
            return await take(calls.parse(kind, upgrade_report(params)))

        return handler
