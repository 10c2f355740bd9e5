"""Tenants get GPU-seconds by weight, regardless of the age of their backlogs, and no job
starves."""

import heapq
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import TenantId
from plexrl.scheduler.accounting.fair_shares import PAUSE_S, decayed_use
from plexrl.scheduler.rules.policies import POLICIES
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

BOUND_S = 600.0
GPUS = 4


def tenant(cluster: FakeCluster, name: str, weight: float) -> None:
    cluster.send(ev.TenantCreated(tenant=name, key_digest=name, is_operator=True))
    cluster.send(
        ev.TenantConfigured(
            tenant=name, weight=weight, jobs_max=None, gpus_max=None, gpu_seconds_max=None
        )
    )


class Load:
    """Tenants that each keep a number of jobs queued, and jobs that end after a fixed time."""

    def __init__(self, policy: str, weights: dict[str, float]) -> None:
        self.cluster = FakeCluster(policy=policy, starvation_bound_s=BOUND_S)
        self.cluster.start_node(GPUS)
        for name, weight in weights.items():
            tenant(self.cluster, name, weight)
        self.numbers = count()
        self.ends: list[tuple[float, str]] = []
        self.lengths: dict[str, float] = {}
        self.owners: dict[str, str] = {}
        self.begun: dict[str, float] = {}
        self.gpu_seconds = dict.fromkeys(weights, 0.0)

    def submit(self, owner: str, workers: int, length_s: float, **fields: object) -> str:
        job = f"{owner}{next(self.numbers)}"
        self.lengths[job], self.owners[job] = length_s, owner
        self.cluster.job(job, owner, **fields)
        self.cluster.deploy(f"{job}/a", "rollout", workers=workers)
        self.look()
        return job

    def queued(self, owner: str) -> int:
        return sum(self.owners[job] == owner and job not in self.begun for job in self.owners)

    def look(self) -> None:
        """Record the jobs that start."""
        for each in self.cluster.core._context.state.deployments.values():
            if each.placement.group is not None and each.job not in self.begun:
                self.begun[each.job] = self.cluster.now
                heapq.heappush(self.ends, (self.cluster.now + self.lengths[each.job], each.job))

    def end_next(self) -> None:
        at, job = heapq.heappop(self.ends)
        self.cluster.pass_time(at - self.cluster.now)
        workers = self.cluster.core._context.state.deployment(f"{job}/a").spec.workers
        self.gpu_seconds[self.owners[job]] += workers * self.lengths[job]
        self.cluster.send(ev.JobFinished(job=job, outcome="completed"))
        self.look()

    def part_of(self, owner: str) -> float:
        return self.gpu_seconds[owner] / sum(self.gpu_seconds.values())


SHORT, WHOLE_CLUSTER = (1, 900.0, 2), (4, 3600.0, 30)
LOADS = (SHORT, WHOLE_CLUSTER, (4, 3600.0, 2), (2, 1800.0, 2), (1, 900.0, 60))


@pytest.mark.parametrize(
    ("policy", "workers", "length_s", "backlog"),
    [
        pytest.param(
            *(policy, *load),
            # Each policy with one load, and one policy with another, are in the short run.
            marks=()
            if load == SHORT or (load, policy) == (WHOLE_CLUSTER, "spread+backfill")
            else pytest.mark.slow,
        )
        for policy in POLICIES
        for load in LOADS
    ],
)
def test_tenants_with_open_backlogs_get_gpu_seconds_by_weight(
    policy: str, workers: int, length_s: float, backlog: int
) -> None:
    """The tenant with the smaller weight has a starving backlog."""
    load = Load(policy, {"one": 1.0, "three": 3.0})
    for _ in range(backlog):
        load.submit("one", workers, length_s)
    load.cluster.pass_time(BOUND_S)
    for step in range(200):
        for owner, wanted in (("one", backlog), ("three", 2)):
            while load.queued(owner) < wanted:
                # Lengths differ, as in life.
                load.submit(owner, workers, length_s * (0.5 + (step * 7 % 10) / 10))
        load.end_next()
    assert load.part_of("three") == pytest.approx(0.75, rel=0.1)


def test_weights_hold_for_jobs_of_different_sizes() -> None:
    load = Load("isolated", {"one": 1.0, "three": 3.0})
    for step in range(300):
        for owner, workers in (("one", (1, 4)), ("three", (2, 1))):
            while load.queued(owner) < 2:
                load.submit(owner, workers[step % 2], 900.0)
        load.end_next()
    assert load.part_of("three") == pytest.approx(0.75, rel=0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_old_backlog_goes_behind_a_fresh_job_of_a_higher_class(policy: str) -> None:
    load = Load(policy, {"old": 1.0, "fresh": 1.0})
    for _ in range(5):
        load.submit("old", 4, 1000.0)
    load.cluster.pass_time(2 * BOUND_S)
    urgent = load.submit("fresh", 4, 1000.0, priority=1)
    load.end_next()
    assert urgent in load.begun


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_job_gets_gpus_although_another_tenant_keeps_small_jobs_queued(
    policy: str,
) -> None:
    load = Load(policy, {"small": 3.0, "large": 1.0})
    before = load.submit("large", 4, 3600.0)
    while before in {job for _, job in load.ends}:
        load.end_next()
    for _ in range(6):
        load.submit("small", 1, 600.0)
    wanted = load.submit("large", 4, 3600.0)
    for step in range(400):
        if wanted in load.begun:
            break
        while load.queued("small") < 3:
            load.submit("small", 1, 300.0 + 70.0 * (step % 9))
        load.end_next()
    # In the meantime the other tenant gets three times what the large tenant has had at most.
    assert load.begun[wanted] - load.begun[before] < 4 * 3600.0 + 2 * BOUND_S + 3600.0


def test_use_of_an_otherwise_idle_cluster_does_not_count_later() -> None:
    load = Load("isolated", {"early": 1.0, "late": 1.0})

    def keep(owner: str) -> None:
        while load.queued(owner) < 2:
            load.submit(owner, 4, 3600.0)

    for _ in range(40):
        keep("early")
        load.end_next()
    load.gpu_seconds = dict.fromkeys(load.gpu_seconds, 0.0)
    for _ in range(40):
        keep("early")
        keep("late")
        load.end_next()
    assert load.part_of("late") == pytest.approx(0.5, rel=0.1)


def test_held_time_survives_a_restart() -> None:
    load = Load("isolated", {"one": 1.0, "three": 3.0})
    for step in range(20):
        for owner in ("one", "three"):
            while load.queued(owner) < 2:
                load.submit(owner, 1 + step % 3, 900.0)
        load.end_next()
    before = load.cluster.core.list_tenants(load.cluster.now)
    load.cluster.restart_scheduler(restored=True)
    assert load.cluster.core.list_tenants(load.cluster.now) == before


jobs = st.lists(
    st.tuples(
        st.sampled_from(("one", "two", "three")),
        st.integers(1, GPUS),
        st.sampled_from((10.0, 300.0, 5000.0)),
        st.integers(-1, 1),
        st.sampled_from((0.0, 60.0, 7000.0)),
        st.sampled_from((0.0, 500.0)),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from(POLICIES), jobs)
def test_under_a_finite_load_every_job_gets_gpus(
    policy: str, wanted: list[tuple[str, int, float, int, float, float]]
) -> None:
    load = Load(policy, {"one": 1.0, "two": 0.1, "three": 3.0})
    for owner, workers, length_s, priority, expected_s, pause_s in wanted:
        load.submit(owner, workers, length_s, priority=priority, expected_s=expected_s)
        load.cluster.pass_time(pause_s)
        load.look()
    for _ in wanted:
        if load.ends:
            load.end_next()
    assert len(load.begun) == len(wanted)


def test_a_job_starves_at_the_bound_and_not_later() -> None:
    load = Load("isolated", {"one": 1.0})
    load.submit("one", GPUS, BOUND_S)
    old = load.submit("one", GPUS, 100.0, expected_s=8000.0)
    load.cluster.pass_time(BOUND_S - 100.0)
    short = load.submit("one", GPUS, 100.0, expected_s=4.0)
    load.end_next()
    assert load.begun[old] == load.cluster.now
    assert short not in load.begun


def test_gpus_that_become_free_together_go_to_the_tenants_in_turns() -> None:
    """GPUs held now count at once; GPU-seconds only as time passes."""
    load = Load("isolated", {"one": 1.0, "three": 3.0})
    load.submit("three", GPUS, BOUND_S - 100.0)
    waiting = [load.submit(owner, 1, 1000.0) for owner in ("one", "three") for _ in range(GPUS)]
    load.end_next()
    begun = [load.owners[job] for job in waiting if job in load.begun]
    assert begun == ["one", "three", "three", "three"]


@pytest.mark.parametrize(("pause_s", "is_level"), [(PAUSE_S - 1.0, False), (PAUSE_S, True)])
def test_a_tenant_that_comes_back_after_a_pause_begins_level_with_the_least(
    pause_s: float, is_level: bool
) -> None:
    """A shorter pause is none: its earlier use goes on to count, and nothing else."""
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(GPUS)
    for name in "tu":
        tenant(cluster, name, 1.0)
        cluster.job(name, name)
        cluster.deploy(f"{name}/a", "rollout", workers=1)
    cluster.send(ev.JobFinished(job="t", outcome="completed"))
    cluster.pass_time(pause_s)
    cluster.job("again", "t")
    cluster.deploy("again/a", "rollout", workers=1)
    holdings = cluster.core.cluster.holdings
    own, other = (decayed_use(holdings, TenantId(name), cluster.now) for name in "tu")
    assert other > 0.0
    assert own == (pytest.approx(other) if is_level else 0.0)
