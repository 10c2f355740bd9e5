"""The StateManagers of a virtual cluster as its shell speaks with them: commands in, events out."""

import json
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from plexrl.errors import PlexRLError, StateLostError, StateTierFullError
from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.state import commands as cmd
from plexrl.scheduler.state import events as ev
from plexrl.sim.engine.shell import VirtualShell
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.state.virtual_state import Move, VirtualState
from plexrl.sim.workload.scenario import NodeType
from plexrl.wire.operations import OperationKind

_LOAD: Final = OperationKind.LOAD


class Refusal(NamedTuple):
    """A load, an offload or a snapshot that cannot be."""

    took_s: float
    """Until that is known."""
    error: PlexRLError

    def answer(self, command: cmd.RunOperation) -> ev.OperationFailed:
        """What the workers say of it."""
        return ev.OperationFailed(
            operation=command.operation,
            token=command.token,
            error_json=json.dumps(self.error.to_wire()),
            state_intact=True,
        )


class NodeStates:
    """All nodes' states. `tell` takes events for the core."""

    def __init__(
        self,
        shell: VirtualShell,
        costs: MoveCosts,
        node_types: Mapping[str, NodeType],
        tell: Callable[[ev.Event], None],
    ) -> None:
        self._shell = shell
        self._tell = tell
        self._states = VirtualState(costs)
        self._away: set[NodeId] = set()
        for name, kind in node_types.items():
            self._states.add_node(NodeId(name), kind)

    def launched(self, command: cmd.LaunchWorkers, state_bytes: int) -> None:
        """A deployment has its GPUs, with so much state on all of them."""
        nodes = [rank.node for rank in command.ranks]
        self._states.launched(command.deployment, state_bytes, nodes)

    def begin(self, command: cmd.RunOperation) -> Move | Refusal:
        """A load, an offload or a snapshot begins."""
        name, now = command.deployment, self._shell.now
        if command.kind != _LOAD:
            move = self._states.offload(name, command.next_use_s, now)
            if move is None:
                return self._refused(name, StateTierFullError(f"no tier has room for {name!r}"))
        elif command.seq == 0:
            move = self._states.build(name)
        else:
            move = self._states.load(name, now)
            if move is None:
                return self._refused(name, StateLostError(f"the state of {name!r} is lost"))
        return move

    def prefetch(self, command: cmd.PrefetchState) -> None:
        """A hint of the scheduler."""
        name, now = command.deployment, self._shell.now
        nodes = [node for node in command.nodes if node not in self._away]
        for at, node in self._states.prefetch(name, nodes, command.next_use_s, now):
            self._shell.at(at, self._prefetched, (name, node))

    def migrate(self, command: cmd.MigrateState) -> None:
        """Nodes are to fetch a version."""
        coming = self._states.migrate(command.deployment, command.nodes, self._shell.now)
        for at, node, is_kept in coming:
            error = "" if is_kept else f"no tier of {node!r} has room"
            migrated = ev.StateMigrated(
                deployment=command.deployment, node=node, seq=command.seq, error=error
            )
            self._shell.at(at, self._migrated, migrated)

    def release(self, command: cmd.ReleaseState) -> None:
        """Nodes are to drop what they have of a deployment."""
        self._states.release(command.deployment, command.nodes)

    def forget(self, deployment: DeploymentId) -> None:
        """A deployment has ended."""
        self._states.forget(deployment)

    def node_lost(self, node: NodeId, survives: bool) -> None:
        """A node is away, and comes back with its host memory if that `survives`."""
        self._away.add(node)
        self._states.node_lost(node, survives)

    def is_away(self, node: NodeId) -> bool:
        """Whether the node is lost."""
        return node in self._away

    def node_back(self, node: NodeId) -> tuple[DeploymentId, ...]:
        """A node is back, with versions of these."""
        self._away.discard(node)
        return self._states.states_on(node)

    def check(self) -> None:
        """Assert that no tier is over its bound, and that all is where it should be."""
        self._states.check()

    def _refused(self, deployment: DeploymentId, error: PlexRLError) -> Refusal:
        return Refusal(self._states.refusal_s(deployment), error)

    def _prefetched(self, subject: tuple[DeploymentId, NodeId]) -> None:
        report = self._states.arrived(*subject, self._shell.now)
        if report is not None:
            self._tell(report)

    def _migrated(self, migrated: ev.StateMigrated) -> None:
        if migrated.node not in self._away:
            self._tell(migrated)
