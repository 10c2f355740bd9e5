"""A snapshot that an earlier version of the scheduler wrote is read, and the scheduler goes on."""

import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

from plexrl.errors import PlexRLError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import config

FIXTURE = Path(__file__).parent / "earlier_snapshot.msgpack.zlib"


class Earlier(msgspec.Struct):
    """A snapshot in the middle of a random history with faults."""

    snapshot: bytes
    events: list[tuple[bytes, float]]
    """What came next, as JSON, and when."""


def test_a_core_goes_on_from_an_earlier_snapshot() -> None:
    earlier = msgspec.msgpack.decode(zlib.decompress(FIXTURE.read_bytes()), type=Earlier)
    core = SchedulerCore.restore(config(), earlier.snapshot)
    core.check_invariants()
    answers = 0
    for text, now in earlier.events:
        # Decisions have changed since, so some of these events name what was not started.
        with suppress(PlexRLError):
            answers += len(core.handle(ev.CODEC.decode(text), now))
        core.check_invariants()
    assert 2 * answers > len(earlier.events), "it hardly works any more"
    assert SchedulerCore.restore(config(), core.dump()).dump() == core.dump()
