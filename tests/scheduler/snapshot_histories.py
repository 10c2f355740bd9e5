"""Random histories of a cluster with a long queue for GPUs, for snapshots at any of their events.

    python -m tests.scheduler.snapshot_histories FIRST COUNT     (a line for each that fails)

The core that wrote a snapshot and the one that read it get the same events for the rest of the
history, and must answer each with the same commands.
"""

import sys
import traceback
from contextlib import suppress
from random import Random

from msgspec.msgpack import decode

from plexrl.errors import PlexRLError
from plexrl.ids import NodeId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.core.snapshot import _Snapshot
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import Command
from tests.scheduler.fake_cluster import FakeCluster, Quick

NODES = ("n1", "n2", "n3")
POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")
EACH = 10
"""Events between two snapshots."""


class Twins(Quick):
    """Two cores get each event. The second one is now and then restored from the first one's
    snapshot; a restored core that is kept shows differences that come late."""

    def __init__(self, random: Random, each: int, **changes: object) -> None:
        super().__init__(random, 0.0, **changes)
        self.second = SchedulerCore(self.config)
        self.each = each

    def send(self, event: ev.Event) -> list[Command]:
        number = len(self.journal)
        self.journal.append((event, self.now))
        first, second = (_answer(core, event, self.now) for core in (self.core, self.second))
        if isinstance(first, PlexRLError):
            assert repr(second) == repr(first)
        else:
            assert second == first
        if number % self.each == 0:
            self._compare()
        if isinstance(first, PlexRLError):
            raise first
        self.take(first)
        return first

    def _compare(self) -> None:
        body, other = self.core.dump(), self.second.dump()
        assert other == body or _read(other) == _read(body), "the states differ"
        if self._chance.random() < 0.7:
            self.second = SchedulerCore.restore(self.config, body)


def history(random: Random, length: int, each: int = EACH) -> Twins:
    """Jobs of several deployments come and go, nodes die and return; little is remembered. A
    snapshot is taken at every so many events.

    Raises:
        AssertionError: a core decides otherwise than the one whose snapshot it has read.
    """
    cluster = Twins(
        random,
        each,
        policy=random.choice(POLICIES),
        residents_max=random.choice((2, 8)),
        horizon_slots=600,
        profile_cycles=1,
        node_replace_s=random.choice((0.0, 20.0)),
        starvation_bound_s=random.choice((0.0, 50.0, 1e6)),
        cold_start_patience_s=random.choice((0.0, 60.0)),
        rebuild_operations=1000,
        searches_max=random.choice((1, 16)),
        ended_jobs=2,
    )
    for node in NODES:
        cluster.join_node(random.choice((2, 4)), node=node, node_type=random.choice("xy"))
    cluster.join_router()
    live: list[str] = []
    for number in range(length):
        with suppress(PlexRLError):
            _anything(cluster, random, live, number)
        for _ in range(random.randrange(5)):
            if cluster.launches:
                cluster.launch(random.choice(cluster.launches))
            elif cluster.migrations:
                cluster.migrate(random.choice(cluster.migrations))
            elif cluster.runs:
                cluster.execute(random.choice(cluster.runs))
    return cluster


def _anything(cluster: FakeCluster, random: Random, live: list[str], number: int) -> None:
    match random.randrange(12):
        case 0 | 1 | 2 | 3:
            live.append(f"j{number}")
            cluster.job(
                live[-1],
                tenant=random.choice("tuvw"),
                gang=random.choice((0, 0, 2)),
                priority=random.choice((0, 0, 1)),
                expected_s=random.choice((0.0, 20.0, 30.0, 100.0, 1e4)),
            )
            for name in "ab":
                cluster.deploy(
                    f"{live[-1]}/{name}",
                    workers=random.choice((1, 2, 4)),
                    trace=random.choice((None, _trace(random))),
                    state_bytes=random.choice((1000, 1 << 20)),
                    node_type=random.choice(("", "", "x")),
                    exclusive=random.random() < 0.2,
                )
        case 4 | 5 if live:
            deployment = f"{random.choice(live)}/{random.choice('ab')}"
            for kind in ("forward_backward", "optim_step"):
                cluster.submit(f"{deployment}:{len(cluster.journal)}", deployment, kind)
        case 6 if live:
            ended = live.pop(random.randrange(len(live)))
            cluster.send(ev.JobFinished(job=ended, outcome="completed"))
        case 7 if live:
            cluster.end(f"{random.choice(live)}/{random.choice('ab')}")
        case 8 | 9:
            cluster.pass_time(random.choice((0.0, 0.1, 5.0, 40.0)))
        case 10:
            node = random.choice(NODES)
            if cluster.core._context.state.nodes[NodeId(node)].alive:
                cluster.lose_node(node)
            else:
                cluster.join_node(node=node)
        case _:
            draining = random.random() < 0.4
            cluster.send(ev.NodeDrainChanged(node=random.choice(NODES), is_draining=draining))


def _trace(random: Random) -> DemandTrace:
    busy = Segment(offset_s=0.0, duration_s=random.choice((6.0, 15.0)))
    return DemandTrace(period_s=60.0, segments=(busy,))


def _answer(core: SchedulerCore, event: ev.Event, now: float) -> list[Command] | PlexRLError:
    """Its commands, or how it refuses the event."""
    try:
        return core.handle(event, now)
    except PlexRLError as error:
        return error


def _read(body: bytes) -> _Snapshot:
    snapshot = decode(body, type=_Snapshot)
    # Timers are a heap, whose layout decides nothing: equal times are taken in the order of names.
    snapshot.timers.sort()
    return snapshot


def main(first: int, count: int, length: int = 40) -> int:
    """Run these seeds; returns how many failed."""
    failed = snapshots = 0
    for seed in range(first, first + count):
        try:
            cluster = history(Random(seed), length)
            snapshots += len(cluster.journal) // EACH + 1
        except Exception as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            sys.stdout.write(f"seed {seed}: {error!r:.200} {where.name}:{where.lineno}\n")
            sys.stdout.flush()
        if (seed - first + 1) % 500 == 0 or seed == first + count - 1:
            sys.stdout.write(
                f"{seed - first + 1} histories, {snapshots} snapshots, {failed} failed\n"
            )
            sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
