"""A snapshot that an earlier version of the scheduler wrote is read, and decided from alike."""

import hashlib
import zlib
from pathlib import Path

import msgspec

from plexrl.errors import PlexRLError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import commands as cmd
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import config

FIXTURE = Path(__file__).parent / "earlier_snapshot.msgpack.zlib"


class Earlier(msgspec.Struct):
    """A snapshot in the middle of a random history with faults."""

    snapshot: bytes
    events: list[tuple[bytes, float]]
    """What came next, as JSON, and when."""
    commands_sha256: str
    """Of what the version that wrote the snapshot answered to these events."""


def test_a_core_from_an_earlier_snapshot_decides_as_its_writer() -> None:
    earlier = msgspec.msgpack.decode(zlib.decompress(FIXTURE.read_bytes()), type=Earlier)
    core, digest = SchedulerCore.restore(config(), earlier.snapshot), hashlib.sha256()
    core.check_invariants()
    for text, now in earlier.events:
        try:
            commands = core.handle(ev.CODEC.decode(text), now)
        except PlexRLError as error:
            digest.update(b"refused %s\n" % type(error).__name__.encode())
            continue
        for command in commands:
            digest.update(cmd.CODEC.encode(command) + b"\n")
    core.check_invariants()
    assert digest.hexdigest() == earlier.commands_sha256
