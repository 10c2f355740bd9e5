"""A scheduler restored from a snapshot goes on, command by command, as the one that wrote it."""

from contextlib import suppress
from random import Random

import pytest

from plexrl.errors import PlexRLError
from plexrl.ids import NodeId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.commands import Command
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

NODES = ("n1", "n2", "n3")
POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")


def history(random: Random) -> FakeCluster:
    """Jobs of several deployments come and go, nodes die and return; little is remembered."""
    cluster = FakeCluster(
        policy=random.choice(POLICIES),
        residents_max=2,
        horizon_slots=600,
        profile_cycles=1,
        node_replace_s=random.choice((0.0, 20.0)),
        starvation_bound_s=random.choice((50.0, 1e6)),
        rebuild_operations=1000,
        searches_max=1,
        ended_jobs=2,
    )
    for node in NODES:
        cluster.join_node(2, node=node)
    cluster.join_router()
    live: list[str] = []
    for number in range(100):
        with suppress(PlexRLError):
            _anything(cluster, random, live, number)
        for _ in range(random.randrange(8)):
            if cluster.launches:
                cluster.launch(random.choice(cluster.launches))
            elif cluster.migrations:
                cluster.migrate(random.choice(cluster.migrations))
            elif cluster.runs:
                cluster.execute(random.choice(cluster.runs))
    return cluster


def _anything(cluster: FakeCluster, random: Random, live: list[str], number: int) -> None:
    match random.randrange(10):
        case 0 | 1 | 2:
            live.append(f"j{number}")
            cluster.job(live[-1], tenant=random.choice("to"), gang=random.choice((0, 0, 2)))
            for name in "ab":
                trace = random.choice((None, _trace(random)))
                workers = random.choice((1, 2, 4))
                cluster.deploy(f"{live[-1]}/{name}", workers=workers, trace=trace)
        case 3 | 4 if live:
            deployment = f"{random.choice(live)}/{random.choice('ab')}"
            for kind in ("forward_backward", "optim_step"):
                cluster.submit(f"{deployment}:{len(cluster.journal)}", deployment, kind)
        case 5 if live:
            ended = live.pop(random.randrange(len(live)))
            cluster.send(ev.JobFinished(job=ended, outcome="completed"))
        case 6 | 7:
            cluster.pass_time(random.choice((0.1, 5.0, 40.0)))
        case 8:
            node = random.choice(NODES)
            if cluster.core._context.state.nodes[NodeId(node)].alive:
                cluster.lose_node(node)
            else:
                cluster.join_node(2, node=node)
        case _:
            draining = random.random() < 0.4
            cluster.send(ev.NodeDrainChanged(node=random.choice(NODES), is_draining=draining))


def _trace(random: Random) -> DemandTrace:
    busy = Segment(offset_s=0.0, duration_s=random.choice((6.0, 15.0)))
    return DemandTrace(period_s=60.0, segments=(busy,))


def answer(core: SchedulerCore, event: ev.Event, now: float) -> list[Command] | str:
    """Its commands, or how it refuses the event."""
    try:
        return core.handle(event, now)
    except PlexRLError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(examples(4)))
def test_a_restored_scheduler_goes_on_as_the_one_that_wrote_the_snapshot(seed: int) -> None:
    random = Random(seed)
    cluster = history(random)
    live, restored = SchedulerCore(cluster.config), SchedulerCore(cluster.config)
    for event, now in cluster.journal:
        assert answer(restored, event, now) == answer(live, event, now)
        body = live.dump()
        assert restored.dump() == body
        if random.random() < 0.3:
            restored = SchedulerCore.restore(cluster.config, body)
