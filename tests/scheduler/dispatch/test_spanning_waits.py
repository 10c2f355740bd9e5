"""Nobody waits much longer than the starvation bound: neither a member of several groups behind
streams of small ones, nor a small one behind a stream of bursts on several groups."""

import math
from itertools import count

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.wire.operations import OperationKind
from tests.examples import examples
from tests.scheduler.dispatch.test_group_shares import QUEUED, Watched
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.jobs.asynchronous_job import Clock
from tests.scheduler.placement.test_shared_rollouts import busy

BURST_MAX_S = 30.0
STARTS_AT = FakeCluster(policy="pack").now
MOVES = (OperationKind.LOAD, OperationKind.OFFLOAD)

seconds = st.integers(1, 40).map(float)
switches = st.integers(0, 8).map(float)
costs = st.tuples(seconds, switches, switches)
"""Seconds of an operation, of a load and of an offload."""


def backlogged(
    larges: list[tuple[float, float, float]],
    smalls: list[tuple[float, float, float]],
    bound_s: float,
) -> Watched:
    """`l0`, … have both GPUs, `s0`, … one each. All of them always have operations that wait."""
    cluster = Watched(
        policy="spread+backfill",
        starvation_bound_s=bound_s,
        burst_max_s=BURST_MAX_S,
        load_max=10.0,
    )
    cluster.start_node(gpus=2)
    clock, numbers = Clock(cluster), count()
    named = {f"l{at}": (2, each) for at, each in enumerate(larges)}
    named |= {f"s{at}": (1, each) for at, each in enumerate(smalls)}
    for at, (job, (workers, (work_s, load_s, offload_s))) in enumerate(named.items()):
        cluster.job(job, tenant=job)
        trace = busy(0.02, offset_s=10.0 * at)
        cluster.deploy(f"{job}/actor", workers=workers, trace=trace)
        clock.takes(f"{job}/actor", optim_step=work_s, load=load_s, offload=offload_s)

    def submit(deployment: str) -> None:
        clock.submit(f"o{next(numbers)}", deployment, "optim_step", lambda: submit(deployment))

    for job in named:
        for _ in range(QUEUED):
            submit(f"{job}/actor")
    clock.run_until(cluster.now + 3000.0)
    cluster.core.check_invariants()
    return cluster


# Without shrinking: a failure must end in time, and an example takes a second.
@settings(
    max_examples=examples(20), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(
    st.lists(costs, min_size=1, max_size=2),
    st.lists(costs, min_size=2, max_size=4),
    st.sampled_from((60.0, 300.0)),
)
def test_nobody_waits_longer_than_the_bound_and_a_burst_of_each_other(
    larges: list[tuple[float, float, float]],
    smalls: list[tuple[float, float, float]],
    bound_s: float,
) -> None:
    """By a clock of its own. A burst yields at the first end of an operation after its bound."""
    cluster = backlogged(larges, smalls, bound_s)
    groups = cluster.core._context.state.groups
    assert len(groups) == 2, "the large ones span two groups"
    bursts = [
        load_s + offload_s + math.ceil(BURST_MAX_S / work_s) * work_s
        for work_s, load_s, offload_s in (*larges, *smalls)
    ]
    longest_s = bound_s + sum(bursts)
    begun: dict[str, list[float]] = {}
    ended: dict[str, float] = {}
    for each in sorted(cluster.spans.values(), key=lambda each: each.begin):
        if each.kind in MOVES:
            continue
        waited_s = each.begin - ended.get(each.tenant, STARTS_AT)
        assert waited_s <= longest_s, (each.tenant, each.begin)
        ended[each.tenant] = each.end
        begun.setdefault(each.tenant, []).append(each.begin)
    assert len(begun) == len(larges) + len(smalls)
