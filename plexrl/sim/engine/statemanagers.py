"""Executes the scheduler's state commands on the simulated StateManagers and reports events."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from plexrl.errors import PlexRLError, StateLostError, StateTierFullError
from plexrl.ids import DeploymentId, GroupId, NodeId
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.shell import VirtualShell
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.state.virtual_state import Move, VirtualState
from plexrl.sim.workload.scenario import NodeType
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind

_LOAD: Final = OperationKind.LOAD


class Refusal(NamedTuple):
    """A load, an offload or a snapshot that fails."""

    took_s: float
    """Seconds until the failure is reported."""
    error: PlexRLError

    def answer(self, command: cmd.Run) -> ev.OperationFailed:
        """The event that reports the failure."""
        return ev.OperationFailed(
            operation=command.operation,
            token=command.token,
            error=self.error.to_wire(),
            state_intact=True,
        )


class NodeStates:
    """The states on all nodes. `send` passes an event to the core."""

    def __init__(
        self,
        shell: VirtualShell,
        costs: MoveCosts,
        node_types: Mapping[str, NodeType],
        send: Callable[[ev.Event], None],
    ) -> None:
        self._shell = shell
        self._send = send
        self._states = VirtualState(costs)
        self._away: set[NodeId] = set()
        self._left: dict[GroupId, tuple[DeploymentId, DeploymentId]] = {}
        """By group: the deployment of its last move, if that was an offload, and its successor."""
        for name, kind in node_types.items():
            self._states.add_node(NodeId(name), kind)

    def launched(self, command: cmd.LaunchWorkers, state_bytes: int) -> None:
        """Record a deployment's GPUs and the total size of its state."""
        nodes = [rank.node for rank in command.ranks]
        self._states.launched(command.deployment, state_bytes, nodes)

    def begin(self, command: cmd.Run) -> Move | Refusal:
        """Begin a load, an offload or a snapshot."""
        name, now = command.deployment, self._shell.now
        former = self._left.pop(command.group, None)
        if not isinstance(command, cmd.Load):
            next_use_s = None
            if isinstance(command, cmd.Offload):
                next_use_s = command.next_use_s
                if command.successor is not None:
                    self._left[command.group] = name, command.successor
            move = self._states.offload(name, next_use_s, now)
            if move is None:
                return self._refused(name, StateTierFullError(f"no tier can hold {name!r}"))
        elif command.seq == 0:
            move = self._states.build(name)
        else:
            move = self._states.load(name, now)
            if move is None:
                return self._refused(name, StateLostError(f"the state of {name!r} is lost"))
            if former is not None and former[1] == name and self._states.knows(former[0]):
                move = self._states.overlap(former[0], move, name)
        return move

    def prefetch(self, command: cmd.PrefetchState) -> None:
        """Begin a prefetch where host memory has space."""
        name, now = command.deployment, self._shell.now
        nodes = [node for node in command.nodes if node not in self._away]
        for at, node in self._states.prefetch(name, nodes, command.next_use_s, now):
            self._shell.at(at, self._prefetched, (name, node))

    def migrate(self, command: cmd.MigrateState) -> None:
        """Copy the newest version to nodes."""
        copies = self._states.migrate(command.deployment, command.nodes, self._shell.now)
        for at, node, is_kept in copies:
            error = "" if is_kept else f"no tier of {node!r} can hold it"
            migrated = ev.StateMigrated(
                deployment=command.deployment, node=node, seq=command.seq, error=error
            )
            self._shell.at(at, self._migrated, migrated)

    def release(self, command: cmd.ReleaseState) -> None:
        """Drop a deployment's state from nodes."""
        self._states.release(command.deployment, command.nodes)

    def forget(self, deployment: DeploymentId) -> None:
        """Drop all state of an ended deployment."""
        self._states.forget(deployment)

    def node_lost(self, node: NodeId, survives: bool) -> None:
        """Mark a node as lost; `survives`: it rejoins with its host memory."""
        self._away.add(node)
        self._states.node_lost(node, survives)

    def is_away(self, node: NodeId) -> bool:
        """Whether the node is lost."""
        return node in self._away

    def node_back(self, node: NodeId) -> tuple[DeploymentId, ...]:
        """Mark a node as rejoined; returns the deployments whose versions it has."""
        self._away.discard(node)
        return self._states.states_on(node)

    def check(self) -> None:
        """Assert the invariants of `VirtualState`."""
        self._states.check()

    def _refused(self, deployment: DeploymentId, error: PlexRLError) -> Refusal:
        return Refusal(self._states.refusal_s(deployment), error)

    def _prefetched(self, subject: tuple[DeploymentId, NodeId]) -> None:
        report = self._states.prefetched(*subject, self._shell.now)
        if report is not None:
            self._send(report)

    def _migrated(self, migrated: ev.StateMigrated) -> None:
        if migrated.node not in self._away:
            self._send(migrated)
