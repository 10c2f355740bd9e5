"""A division of the instances is found again in the store, whatever was measured after it."""

from dataclasses import replace
from pathlib import Path

from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    ParametersPushed,
    RolloutCommand,
    StepMeasured,
    StepsMeasured,
)
from plexrl.rollout.service.journal.state import RolloutState
from plexrl.rollout.service.journal.store import JournalEntry, RolloutStore
from tests.rollout.ranking.test_length_aware import Rig
from tests.rollout.test_service_store import ORDER, order_of

LENGTHS = [100] * 16 + [1000] * 4


class StoredRig(Rig):
    """A rig whose events are stored, and replayed as a service that starts again does."""

    def __init__(self, prompts: int, instances: int, path: Path) -> None:
        self.store = RolloutStore(path)
        self.store.begin(ORDER)
        self.state: RolloutState | None = None
        self.entries: list[JournalEntry] = []
        super().__init__(prompts, instances)

    def decide(self, event: object) -> list[RolloutCommand]:
        if self.state is None:
            self.order = order_of(self.core.settings)
            self.state = RolloutState.new(self.order)
            self.core = self.state.core
        taken = self.state.take(event, self.store)  # type: ignore[arg-type]
        if taken is None:
            return []
        self.entries.append(taken[0])
        return list(taken[0].commands)

    def check_replay(self) -> None:
        assert self.state is not None
        self.store.write(self.entries)
        again = RolloutState.stored(self.order, self.store)
        assert again.plain() == self.state.plain()


def test_a_division_that_gave_no_command_is_found_again(tmp_path: Path) -> None:
    """It is chosen during training, and what is measured then leads to another one."""
    rig = StoredRig(len(LENGTHS), 16, tmp_path / "rollout.sqlite")
    rig.train(LENGTHS, LENGTHS)
    version = rig.core.newest_version
    rig.add(LENGTHS)
    rig.tell(BatchRequested())
    rig.cycle()
    for name, held in rig.held.items():
        for each in list(held):
            rig.end(name, each, LENGTHS[each // 2 % len(LENGTHS)])
    rig.add(LENGTHS)
    rig.cycle()  # no instance has the weights of the next version yet
    assert not any(rig.held.values())
    division = replace(rig.core.trajectories.lengths.division)
    assert division.long
    assert division.prompts == rig.added
    # A step hardly grows with its batch, so nothing would be divided now.
    steps = [
        StepMeasured(kv_cache=10.0 * n, running=n, seconds=0.05 + 1e-9 * n) for n in range(1, 64)
    ]
    rig.tell(StepsMeasured(steps=tuple(steps)))
    rig.tell(ParametersPushed(version=version + 1))
    rig.tell(BatchRequested())
    rig.cycle()
    rig.cycle()
    assert sum(map(len, rig.held.values())) == 2 * len(LENGTHS)
    assert rig.core.trajectories.lengths.division == division
    rig.check_replay()
    rig.store.close()
