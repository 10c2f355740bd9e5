"""Calls of node agents: reports on the workers and states of their own node."""

from typing import TYPE_CHECKING

from plexrl.errors import (
    PermissionDeniedError,
    UnknownDeploymentError,
)
from plexrl.scheduler.service.shell import Shell
from plexrl.scheduler.state.messages.calls import Report
from plexrl.wire.messages.cluster_views import EmptyView
from plexrl.wire.messages.reports import (
    HostMemoryReported,
    NodeConditionsReported,
    StateReported,
    WorkerExited,
    WorkerReady,
    WorkerWanted,
)
from plexrl.wire.rpc import method_of

if TYPE_CHECKING:
    from plexrl.ids import NodeId


class AgentCalls:
    """Calls of a node agent about the workers of its node."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._core = shell.core
        self.node: NodeId | None = None
        """Set by the hello."""

    def reports(self) -> dict[str, Report]:
        """Calls of the agent."""
        reports: tuple[Report, ...] = (
            (WorkerReady, self._worker_ready),
            (WorkerExited, self._worker_exited),
            (StateReported, self._state_reported),
            (HostMemoryReported, self._host_memory_reported),
            (NodeConditionsReported, self._conditions_reported),
        )
        return {method_of(report[0]): report for report in reports}

    async def _worker_ready(self, event: WorkerReady) -> WorkerWanted:
        if not self._is_current(event):
            return {"wanted": False}
        await self._shell.report(event)
        return {"wanted": self._is_current(event)}

    async def _worker_exited(self, event: WorkerExited) -> EmptyView:
        if self._is_current(event):
            await self._shell.report(event)
        return {}

    async def _state_reported(self, event: StateReported) -> EmptyView:
        if event.node != self.node:
            raise PermissionDeniedError(f"this is not the agent of node {event.node!r}")
        await self._shell.report(event)
        return {}

    async def _host_memory_reported(self, call: HostMemoryReported) -> EmptyView:
        if call.node != self.node:
            raise PermissionDeniedError(f"this is not the agent of node {call.node!r}")
        self._shell.agents.host_memory[call.node] = call
        return {}

    async def _conditions_reported(self, call: NodeConditionsReported) -> EmptyView:
        if call.node != self.node:
            raise PermissionDeniedError(f"this is not the agent of node {call.node!r}")
        self._shell.agents.conditions[call.node] = call.conditions
        return {}

    def _is_current(self, event: WorkerReady | WorkerExited) -> bool:
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
