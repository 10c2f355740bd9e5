"""Tenants that always have work waiting for one group share it by their weights."""

import math
from dataclasses import dataclass
from itertools import combinations, count

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.ids import TenantId
from plexrl.scheduler.dispatch.bursts import BOUND_S_MIN
from plexrl.scheduler.dispatch.candidates.group_shares import settle_shares
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.jobs.asynchronous_job import Clock

QUEUED = 3
"""Operations that wait at every moment, so that nobody ever pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A tenant whose jobs always have work waiting."""

    weight: float
    jobs: tuple[tuple[float, float, float], ...]
    """Of each: seconds of an operation, of a load, and of an offload."""


@dataclass(slots=True)
class Span:
    """A run on the group."""

    begin: float
    end: float
    tenant: str
    kind: OperationKind


class Watched(FakeCluster):
    """Notes when runs begin and end, apart from all that the scheduler counts."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.spans: dict[tuple[str, int], Span] = {}

    def send(self, event: ev.Event) -> list[cmd.Command]:
        """Without the check of all invariants, which takes most of the time."""
        commands = self.core.handle(event, self.now)
        self.take(commands)
        return commands

    def take(self, commands: list[cmd.Command]) -> None:
        super().take(commands)
        for command in commands:
            if isinstance(command, cmd.Run):
                key = command.operation, int(command.token)
                owner = command.deployment.split("-")[0]
                self.spans.setdefault(key, Span(self.now, math.inf, owner, command.kind))

    def execute(self, run: cmd.Run, **options: object) -> None:
        self.spans[run.operation, int(run.token)].end = self.now
        super().execute(run, **options)


def timeline(cluster: Watched) -> list[Span]:
    """What ran, in order; each offload counts for the tenant that is loaded after it."""
    spans = sorted(cluster.spans.values(), key=lambda each: each.begin)
    spans = [each for each in spans if each.end < math.inf]
    for before, after in zip(reversed(spans[:-1]), reversed(spans[1:]), strict=True):
        if before.kind == OperationKind.OFFLOAD:
            before.tenant = after.tenant
    return spans


def run(tenants: dict[str, Backlog], burst_max_s: float, until_s: float) -> Watched:
    cluster = Watched(burst_max_s=burst_max_s, starvation_bound_s=1e9, load_max=100.0)
    cluster.start_node(2)
    clock, numbers = Clock(cluster), count()
    for tenant, backlog in tenants.items():
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
        cluster.send(
            ev.TenantConfigured(
                tenant=tenant,
                weight=backlog.weight,
                jobs_max=None,
                gpus_max=None,
                gpu_seconds_max=None,
            )
        )
        for index, (work_s, load_s, offload_s) in enumerate(backlog.jobs):
            job = f"{tenant}-{index}"
            cluster.job(job, tenant=tenant)
            cluster.deploy(f"{job}/actor")
            clock.takes(f"{job}/actor", forward_backward=work_s, load=load_s, offload=offload_s)

    def submit(deployment: str) -> None:
        def again() -> None:
            submit(deployment)

        clock.submit(f"o{next(numbers)}", deployment, "forward_backward", again)

    for name in list(cluster.core._context.state.deployments):
        for _ in range(QUEUED):
            submit(name)
    clock.run_until(cluster.now + until_s)
    cluster.core.check_invariants()
    return cluster


seconds = st.integers(1, 40).map(float)
switches = st.integers(0, 8).map(float)
backlogs = st.builds(
    Backlog,
    weight=st.sampled_from((0.5, 1.0, 2.0, 3.0)),
    jobs=st.lists(st.tuples(seconds, switches, switches), min_size=1, max_size=2).map(tuple),
)


# Without shrinking: a failure must end in time, and an example takes a second.
@settings(
    max_examples=examples(25), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(st.lists(backlogs, min_size=2, max_size=4), st.sampled_from((1.0, 30.0, 90.0, 300.0)))
def test_seconds_by_weight_of_backlogged_tenants_differ_by_two_bursts_at_most(
    found: list[Backlog], burst_max_s: float
) -> None:
    """In every interval, with all switches counted, by a clock of its own."""
    tenants = dict(zip("abcd", found, strict=False))
    spans = timeline(run(tenants, burst_max_s, until_s=2000.0))
    offload_s = max(job[2] for each in found for job in each.jobs)
    round_trip_s = max(job[1] + job[2] for each in found for job in each.jobs)
    burst_s = {
        # A burst yields at the first end of an operation after its bound.
        tenant: max(
            offload_s + load_s + math.ceil(bound_s / work_s) * work_s
            for work_s, load_s, own_offload_s in backlog.jobs
            for bound_s in [longest_s(load_s + own_offload_s + round_trip_s, burst_max_s)]
        )
        for tenant, backlog in tenants.items()
    }
    begins = [at for at, each in enumerate(spans) if each.kind == OperationKind.OFFLOAD]
    for one, other in combinations(tenants, 2):
        lead, highest, lowest = 0.0, 0.0, 0.0
        for span in spans[begins[0] :] if begins else []:
            held_s = span.end - span.begin
            if span.tenant in (one, other):
                share = held_s / tenants[span.tenant].weight
                lead += share if span.tenant == one else -share
            highest, lowest = max(highest, lead), min(lowest, lead)
        largest = max(burst_s[each] / tenants[each].weight for each in (one, other))
        assert highest - lowest <= 2.0 * largest + 1e-6


def longest_s(interruption_s: float, burst_max_s: float) -> float:
    """The bound of a burst that never ends."""
    return min(burst_max_s, max(20.0 * interruption_s, BOUND_S_MIN))


def test_a_job_that_pauses_is_ordered_by_the_rule_alone() -> None:
    """No share is counted while no tenant always has work waiting."""
    cluster = FakeCluster(load_max=100.0)
    cluster.start_node(2)
    clock, numbers = Clock(cluster), count()
    for tenant in "ab":
        cluster.job(tenant, tenant=tenant)
        cluster.deploy(f"{tenant}/actor")
        clock.takes(f"{tenant}/actor", optim_step=10.0)
    for _ in range(20):
        for tenant in "ab":
            clock.submit(f"o{next(numbers)}", f"{tenant}/actor", "optim_step", lambda: None)
        clock.run_until(cluster.now + 60.0)
        (group,) = cluster.core._context.state.groups.values()
        assert not group.shares


def test_a_newcomer_begins_with_the_least_share_of_those_who_contend() -> None:
    cluster = FakeCluster(load_max=100.0)
    cluster.start_node(2)
    for tenant in "abc":
        cluster.job(tenant, tenant=tenant)
        cluster.deploy(f"{tenant}/actor")
    cluster.settle()
    context = cluster.core._context
    (group,) = context.state.groups.values()
    group.holder, group.shares = None, {TenantId("a"): 70.0, TenantId("b"): 90.0}
    members = [context.state.deployments[name] for name in group.members]
    settle_shares(context.step(cluster.now), group, members)
    assert group.shares == {"a": 70.0, "b": 90.0, "c": 70.0}

    # Once a tenant is alone, the shares of before mean nothing.
    settle_shares(context.step(cluster.now), group, members[:1])
    assert not group.shares


def test_time_in_which_nobody_else_waited_takes_nothing_from_others() -> None:
    cluster = FakeCluster(load_max=100.0)
    cluster.start_node(2)
    for tenant in "ab":
        cluster.job(tenant, tenant=tenant)
        cluster.deploy(f"{tenant}/actor")
    cluster.settle()
    context = cluster.core._context
    (group,) = context.state.groups.values()
    holder, other = (context.state.deployments[name] for name in group.members)
    now = cluster.now + 100.0
    group.holder, group.shared_at = holder.deployment, now - 50.0
    group.shares = {TenantId("a"): 0.0, TenantId("b"): 0.0}
    # The other one came in the middle of what the holder had since the last settlement.
    holder.demand.burst.wants_since, other.demand.burst.wants_since = now, now - 20.0
    settle_shares(context.step(now), group, [holder, other])
    assert group.shares == {"a": 20.0, "b": 0.0}
    # It has waited for longer than since that settlement.
    settle_shares(context.step(now + 5.0), group, [holder, other])
    assert group.shares == {"a": 25.0, "b": 0.0}


def test_a_tenant_waits_from_the_arrival_of_its_first_operation_on() -> None:
    """Whichever of its members comes first in the list."""
    cluster = FakeCluster(load_max=100.0)
    cluster.start_node(2)
    for job, tenant in (("a", "a"), ("b", "b"), ("c", "b")):
        cluster.job(job, tenant=tenant)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    context, now = cluster.core._context, cluster.now + 100.0
    (group,) = context.state.groups.values()
    holder, *others = (context.state.deployments[name] for name in group.members)
    for early, late in (others, others[::-1]):
        group.holder, group.shared_at = holder.deployment, now - 50.0
        group.shares = {TenantId("a"): 0.0, TenantId("b"): 0.0}
        early.demand.burst.wants_since, late.demand.burst.wants_since = now - 20.0, now - 5.0
        settle_shares(context.step(now), group, [holder, *others])
        assert group.shares == {"a": 20.0, "b": 0.0}
