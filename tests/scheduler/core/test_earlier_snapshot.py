"""A snapshot that an earlier version of the scheduler wrote is read, and the scheduler goes on."""

import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.ids import JobId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.operation import error_view
from tests.scheduler.fake_cluster import FakeCluster, config
from tests.scheduler.flat_deployments import flatten

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


def test_deployments_of_a_pass_that_an_earlier_version_interrupted_get_their_turn() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(1)
    for name in ("one", "two"):
        cluster.job(name)
        cluster.deploy(f"{name}/a", workers=1)
    context = cluster.core._context
    # The capacity is free, and the rest of the pass was due in the next event.
    ended = ev.JobFinished(job=JobId("one"), outcome="completed")
    cluster.core._handlers[ev.JobFinished](ended, cluster.now)
    context.cluster.queues.waiting.must_retry = False
    context.effects.commands.clear()
    context.effects.dirty.clear()
    context.effects.wake(cluster.now, timers.Subject(timers.TimerKind.ADMISSION, ""))
    plain = msgspec.msgpack.decode(cluster.core.dump())
    plain |= {"admission": {"began_at": cluster.now, "heap": []}, "queues_changed": True}
    core = SchedulerCore.restore(cluster.config, msgspec.msgpack.encode(plain))
    assert "two/a" in core._context.cluster.queues.waiting
    core.handle(ev.TimerFired(), cluster.now)
    assert "two/a" not in core._context.cluster.queues.waiting


def test_errors_that_earlier_versions_kept_as_text_are_read() -> None:
    cluster = FakeCluster()
    cluster.start_node(2)
    cluster.job("a", halts_on_failure=True)
    cluster.deploy("a/actor")
    cluster.submit("a:s", "a/actor", "optim_step")
    while not any(run.operation == "a:s" for run in cluster.runs):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        else:
            cluster.execute(cluster.runs[0])
    run = cluster.runs.pop()
    error = error_view(InvalidRequestError("it cannot be done", parameter="x"))
    cluster.send(
        ev.OperationFailed(operation="a:s", token=run.token, error=error, state_intact=True)
    )
    plain = msgspec.msgpack.decode(cluster.core.dump())
    plain["version"] = 4
    state = plain["state"]
    flatten(state)
    failures = [each for d in state["deployments"].values() for each in d["unacknowledged"]]
    assert len(failures) == 1
    for each in (*state["operations"].values(), *failures):
        found = each.pop("error")
        each["error_json"] = None if found is None else msgspec.json.encode(found).decode()
    core = SchedulerCore.restore(cluster.config, msgspec.msgpack.encode(plain))
    assert core.dump() == cluster.core.dump()
