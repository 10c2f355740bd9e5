"""Snapshots that earlier versions of the scheduler wrote are read, and decided from alike."""

import hashlib
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from plexrl.errors import PlexRLError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.core.snapshot import VERSION
from plexrl.scheduler.state.messages import commands as cmd
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.timers import TimerKind, parse
from tests.scheduler.fake_cluster import config

FIXTURE = Path(__file__).parent / "snapshot_v1.msgpack.zlib"


class Old(NamedTuple):
    """A snapshot of version 1, in the middle of a random history with faults."""

    snapshot: bytes
    events: list[tuple[str, float]]
    """What came next, as JSON, and when."""
    commands_sha256: str
    """Of what the version that wrote the snapshot answered to these events."""


LATER_FIELDS: dict[type, tuple[str, ...]] = {
    cmd.LaunchWorkers: ("rendezvous",),
    cmd.RunOperation: ("incarnation", "partial", "successor", "successor_seq"),
    cmd.AbortOperation: ("incarnation", "token"),
}
"""Fields of commands that version 1 did not have."""


def as_in_version_1(command: cmd.Command) -> bytes:
    plain = msgspec.json.decode(cmd.CODEC.encode(command))
    for name in LATER_FIELDS.get(type(command), ()):
        del plain[name]
    return msgspec.json.encode(plain)


@pytest.fixture(scope="module")
def old() -> Old:
    found = msgspec.msgpack.decode(zlib.decompress(FIXTURE.read_bytes()))
    return Old(**found)


def test_a_core_from_a_snapshot_of_version_1_decides_as_its_writer(old: Old) -> None:
    core, digest = SchedulerCore.restore(config(), old.snapshot), hashlib.sha256()
    core.check_invariants()
    for text, now in old.events:
        event = ev.CODEC.decode(text)
        try:
            commands = core.handle(event, now)
        except PlexRLError as error:
            digest.update(b"refused %s\n" % type(error).__name__.encode())
            continue
        if isinstance(event, ev.JobFinished) and event.outcome == "detached":
            timeout_s = core._state.job(event.job).controller_timeout_s
            if (at := now - timeout_s + timeout_s) > now:
                # Version 1 detached a job by a timer, one rounding error later.
                digest.update(as_in_version_1(cmd.SetTimer(at=at)) + b"\n")
        for command in commands:
            if command == cmd.SetTimer(at=now + core.settings.config.starvation_bound_s):
                # Version 1 awaited the profile of a member for ever.
                continue
            digest.update(as_in_version_1(command) + b"\n")
    core.check_invariants()
    assert digest.hexdigest() == old.commands_sha256


def test_a_snapshot_of_version_1_is_written_again_as_the_present_version(old: Old) -> None:
    again = SchedulerCore.restore(config(), old.snapshot).dump()
    assert msgspec.msgpack.decode(again)["version"] == VERSION
    assert SchedulerCore.restore(config(), again).dump() == again


@pytest.mark.parametrize("kind", TimerKind)
def test_the_text_of_a_timers_subject_is_read_back(kind: TimerKind) -> None:
    subject = parse(f"{kind}:a/b:c")
    assert (subject.kind, subject.name) == (kind, "a/b:c")
    assert str(subject) == f"{kind}:a/b:c"
