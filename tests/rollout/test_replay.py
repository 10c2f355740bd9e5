"""Events can be written down and read back, and lead another coordinator to the same commands."""

from random import Random

import msgspec

from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import RolloutCommand, RolloutEvent
from tests.rollout.history import History


def played(seed: int) -> History:
    history = History(Random(seed))
    for _ in range(60):
        history.act()
    history.finish()
    return history


def test_the_same_events_lead_to_the_same_commands() -> None:
    seen: set[str] = set()
    for seed in range(60):
        history = played(seed)
        core = RolloutCoordinator(history.fleet.settings)
        for event, commands in history.fleet.log:
            again = msgspec.json.decode(msgspec.json.encode(event), type=type(event))
            assert again == event
            assert core.handle(again) == commands
            for each in commands:
                assert msgspec.json.decode(msgspec.json.encode(each), type=type(each)) == each
            seen |= {type(each).__name__ for each in (event, *commands)}
    known = {
        each.__name__ for each in (*RolloutEvent.__subclasses__(), *RolloutCommand.__subclasses__())
    }
    assert known == seen


def test_the_same_seed_leads_to_the_same_log() -> None:
    first, second = played(7).fleet.log, played(7).fleet.log
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
