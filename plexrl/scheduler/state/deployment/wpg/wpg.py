"""A WPG's state and residency: the only module that writes either.

What a WPG is doing follows from both tables (`machines.wpg_states`, `machines.residency_states`).
Only a READY WPG moves its training state, so every transition that ends its processes makes its
residency NONE too.
"""

from dataclasses import dataclass, field

from plexrl.ids import NodeId
from plexrl.scheduler.state.deployment.wpg.backoff import Backoff
from plexrl.scheduler.state.deployment.wpg.moves import Moves
from plexrl.scheduler.state.deployment.wpg.processes import Processes
from plexrl.scheduler.state.deployment.wpg.stored_version import PublishedVersion, StoredVersion
from plexrl.scheduler.state.machines.residency_states import (
    Residency,
    ResidencyTrigger,
    next_residency,
)
from plexrl.scheduler.state.machines.wpg_states import WpgState, WpgTrigger, next_state
from plexrl.wire.messages import AnyMove


@dataclass(slots=True, kw_only=True)
class Wpg:
    """The worker process group of a deployment."""

    state: WpgState = WpgState.WAITING
    residency: Residency = Residency.NONE
    processes: Processes = field(default_factory=Processes)
    moving: AnyMove | None = None
    """The internal move (load, offload, snapshot) in flight."""
    moves: Moves = field(default_factory=Moves)
    stored: StoredVersion = field(default_factory=StoredVersion)
    published: PublishedVersion | None = None
    """What its newest `publish` made; None: there is none, or it is gone."""
    reader_nodes: list[NodeId] = field(default_factory=list)
    """Other nodes that have pulled what it published; their StateManagers may hold replicas."""
    backoff: Backoff = field(default_factory=Backoff)
    no_snapshot_until: float = 0.0
    """Earliest time of the next snapshot after one that found no free space. 0: the last one
    succeeded."""

    @property
    def is_ready(self) -> bool:
        return self.state == WpgState.READY

    def launch_first(self) -> None:
        """Start its processes on its first GPUs."""
        self._change(WpgTrigger.PLACED)

    def resume(self) -> None:
        """Start its processes on other GPUs, or from other nodes' copies."""
        self._change(WpgTrigger.RESUMED)

    def await_copies(self, nodes: list[NodeId]) -> None:
        """Wait on other GPUs until `nodes` have its durable version; its processes start then."""
        self._change(WpgTrigger.MIGRATED)
        self.stored.await_copies(nodes)

    def connect(self, now: float) -> None:
        """All its processes are ready."""
        self._change(WpgTrigger.CONNECTED)
        self.processes.note_ready(now)

    def interrupt(self) -> None:
        """Its processes are given up; others are to be started."""
        self._change(WpgTrigger.INTERRUPTED)
        self._change_residency(ResidencyTrigger.PROCESSES_GONE)

    def lose_processes(self) -> None:
        """The processes on the GPUs that it leaves are stopped; the next state is decided later."""
        self.processes.lose_all()
        self._change_residency(ResidencyTrigger.PROCESSES_GONE)

    def displace(self) -> None:
        """Record that it has left its group and waits for other GPUs."""
        self._change(WpgTrigger.DISPLACED)
        self.stored.stop_awaiting()
        self.processes.cancel_launch()
        self.processes.lose_all()

    def end(self) -> None:
        """The deployment was ended, or its job was."""
        self._change(WpgTrigger.ENDED)

    def begin_load(self) -> None:
        """Its state is on its way to the GPUs."""
        self._change_residency(ResidencyTrigger.LOAD_BEGAN)

    def end_load(self) -> None:
        """Its state is on the GPUs."""
        self._change_residency(ResidencyTrigger.LOADED)

    def refuse_load(self, *, is_first: bool) -> None:
        """A load ended and changed nothing. `is_first`: no version of its state was stored yet."""
        refused = ResidencyTrigger.LOAD_REFUSED
        self._change_residency(ResidencyTrigger.FIRST_LOAD_REFUSED if is_first else refused)

    def begin_offload(self) -> None:
        """Its state is on its way off the GPUs."""
        self._change_residency(ResidencyTrigger.OFFLOAD_BEGAN)

    def end_offload(self) -> None:
        """Its state is off the GPUs."""
        self._change_residency(ResidencyTrigger.OFFLOADED)

    def refuse_offload(self) -> None:
        """An offload ended and changed nothing."""
        self._change_residency(ResidencyTrigger.OFFLOAD_REFUSED)

    def begin_move(self, command: AnyMove) -> None:
        """A move of its whole state was sent to its workers."""
        self.moving = command

    def end_move(self) -> None:
        """The move has ended, or was called off."""
        self.moving = None

    def delay_snapshots(self, until: float) -> None:
        """A snapshot found no free space."""
        self.no_snapshot_until = until

    def allow_snapshots(self) -> None:
        """A snapshot succeeded."""
        self.no_snapshot_until = 0.0

    def publish(self, version: PublishedVersion) -> None:
        """This version was published."""
        self.published = version

    def add_reader(self, node: NodeId) -> None:
        """A node pulls what was published."""
        self.reader_nodes.append(node)

    def _change(self, trigger: WpgTrigger) -> None:
        self.state = next_state(self.state, trigger)

    def _change_residency(self, trigger: ResidencyTrigger) -> None:
        self.residency = next_residency(self.residency, trigger)
