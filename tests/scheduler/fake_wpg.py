"""The state of one deployment, as far as the scheduler core can tell."""

from dataclasses import dataclass, field

from plexrl.wire import messages as cmd


@dataclass(slots=True)
class Wpg:
    """The processes of one deployment, and what the StateManagers hold of it."""

    incarnation: int = 0
    device: list[str] | None = None
    versions: dict[int, list[str]] = field(default_factory=dict)
    held_on: dict[int, set[str]] = field(default_factory=dict)
    """Nodes whose StateManagers hold each version."""
    nodes: set[str] = field(default_factory=set)
    """Where the processes are."""
    highest_token: int = 0
    refused: set[tuple[str, int]] = field(default_factory=set)
    """Runs that these processes have answered with a refusal, which they would repeat."""

    def store(self, run: cmd.Offload | cmd.Snapshot) -> None:
        """Store what is on the device, unless that is done."""
        if self.device is not None:
            self._store(run.seq, self.device, (run.keep_seq, run.previous_seq, run.base_seq))

    def step_stored(self, run: cmd.OptimStep, order: cmd.SaveRequest) -> None:
        """Make a version of the stored one."""
        assert self.device is None, f"{run.operation} steps a state that is loaded"
        kept = (order.keep_seq, order.previous_seq, order.base_seq)
        self._store(order.seq, [*self.versions[order.keep_seq], run.operation], kept)

    def _store(self, seq: int, state: list[str], kept: tuple[int, ...]) -> None:
        self.versions = {known: each for known, each in self.versions.items() if known in kept}
        self.versions[seq] = list(state)
        self.held_on[seq] = set(self.nodes)


def is_stored_step(run: cmd.Run) -> bool:
    """Whether a run makes a version of another one, without the device."""
    return isinstance(run, cmd.OptimStep) and run.stored is not None
