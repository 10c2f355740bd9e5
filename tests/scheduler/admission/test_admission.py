"""The order of admission: gangs, quotas, priorities, weights and starvation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl import errors
from plexrl.ids import DeploymentId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.placement.choice.scarcity import is_scarce
from plexrl.scheduler.queries.views import usage_view
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from tests.scheduler.fake_cluster import FakeCluster

BOUND_S = 600.0


def cluster_of(gpus: int = 4, **changes: object) -> FakeCluster:
    cluster = FakeCluster(**{"policy": "isolated", **changes})
    cluster.start_node(gpus)
    return cluster


def tenant(cluster: FakeCluster, name: str, weight: float = 1.0, **limits: object) -> None:
    if name not in cluster.core.tenants():
        cluster.send(ev.TenantCreated(tenant=name, key_digest=name))
    fields: dict[str, object] = {"jobs_max": None, "gpus_max": None, "gpu_seconds_max": None}
    cluster.send(ev.TenantConfigured(tenant=name, weight=weight, **{**fields, **limits}))


def submit(cluster: FakeCluster, job: str, workers: int, **fields: object) -> None:
    """A job of one exclusive trainer."""
    cluster.job(job, **fields)
    cluster.deploy(f"{job}/actor", workers=workers)


def end(cluster: FakeCluster, job: str) -> None:
    cluster.send(ev.JobFinished(job=job, outcome="completed"))


def placed(cluster: FakeCluster) -> list[str]:
    """Deployments that have GPUs."""
    views = [d for job in cluster.core.list_jobs(None, cluster.now) for d in job["deployments"]]
    return sorted(view["deployment"] for view in views if view["group"] is not None)


def rule_of(cluster: FakeCluster, job: str) -> str:
    return str(cluster.core.explain_job(job, cluster.now)["summary"])


def test_a_gang_gets_all_its_gpus_or_none() -> None:
    cluster = cluster_of()
    submit(cluster, "a", 2)
    groups = cluster.core.list_groups(cluster.now)
    cluster.job("g", gang=2)
    cluster.deploy("g/actor", workers=2)
    assert placed(cluster) == ["a/actor"], "a gang is held until all of it exists"
    assert "gang of 2 has 1" in rule_of(cluster, "g")
    cluster.deploy("g/rollout", "rollout", workers=2)
    assert placed(cluster) == ["a/actor"]
    assert cluster.core.list_groups(cluster.now) == groups
    assert cluster.core.list_nodes()[0]["gpus_reserved"] == 2
    assert [view["ranks"] for view in cluster.core.job_view("g", cluster.now)["deployments"]] == [
        [],
        [],
    ]
    end(cluster, "a")
    assert placed(cluster) == ["g/actor", "g/rollout"]


def test_a_gang_that_does_not_fit_leaves_shared_groups_as_they_were() -> None:
    cluster = cluster_of(5, policy="pack")
    submit(cluster, "a", 2)
    cluster.deploy("a/rollout", "rollout", workers=1)
    groups = cluster.core.list_groups(cluster.now)
    cluster.job("g", gang=3)
    cluster.deploy("g/actor", workers=2)
    cluster.deploy("g/critic", workers=1)
    cluster.deploy("g/rollout", "rollout", workers=2)
    assert cluster.core.list_groups(cluster.now) == groups
    cluster.restart_scheduler(restored=True)
    assert cluster.core.list_groups(cluster.now) == groups


def test_a_gang_beyond_its_quota_is_explained_and_blocks_no_other_job() -> None:
    cluster = cluster_of()
    submit(cluster, "a", 4, tenant="u")
    cluster.job("g", gang=2)
    cluster.deploy("g/one", workers=2)
    cluster.deploy("g/two", workers=2)
    # An operator lowers the quota while it waits.
    tenant(cluster, "t", gpus_max=3)
    cluster.pass_time(BOUND_S + 1)
    submit(cluster, "b", 3, tenant="u")
    end(cluster, "a")
    assert placed(cluster) == ["b/actor"]
    assert "its quota is 3; this asks for 4" in rule_of(cluster, "g")
    tenant(cluster, "t", gpus_max=4)
    end(cluster, "b")
    assert placed(cluster) == ["g/one", "g/two"]


def test_a_gang_that_its_tenants_quota_could_never_hold_is_refused() -> None:
    cluster = cluster_of()
    tenant(cluster, "t", gpus_max=3)
    cluster.job("g", gang=2)
    cluster.deploy("g/one", workers=2)
    with pytest.raises(errors.QuotaExceededError, match="4 GPUs at once"):
        cluster.deploy("g/two", workers=2)


def test_all_jobs_that_fit_start_when_a_large_job_ends() -> None:
    cluster = cluster_of(policy="spread")
    submit(cluster, "a", 4)
    for job in ("b", "c"):
        submit(cluster, job, 2)
    end(cluster, "a")
    assert placed(cluster) == ["b/actor", "c/actor"]


def test_a_job_that_holds_gpus_goes_first() -> None:
    cluster = cluster_of()
    cluster.job("a")
    cluster.deploy("a/actor", workers=1)
    submit(cluster, "b", 3)
    submit(cluster, "c", 2, priority=100)
    cluster.deploy("a/rollout", "rollout", workers=2)
    end(cluster, "b")
    assert placed(cluster) == ["a/actor", "a/rollout"]


def test_a_higher_priority_class_goes_first() -> None:
    cluster = cluster_of()
    submit(cluster, "a", 4)
    submit(cluster, "low", 4, priority=-1)
    submit(cluster, "middle", 4)
    submit(cluster, "high", 4, priority=1)
    order = []
    for _ in range(3):
        (held,) = placed(cluster)
        end(cluster, held.split("/")[0])
        order += placed(cluster)
    assert order == ["high/actor", "middle/actor", "low/actor"]


def test_a_tenant_cannot_exceed_its_maximum_priority() -> None:
    cluster = cluster_of()
    tenant(cluster, "t")
    with pytest.raises(errors.QuotaExceededError, match="an operator for a higher priority_max"):
        cluster.job("a", priority=1)
    assert not cluster.core.list_jobs(None, cluster.now)
    cluster.job("low", priority=-100)
    tenant(cluster, "t", priority_max=7)
    assert cluster.core.list_tenants(cluster.now)[0]["priority_max"] == 7
    cluster.job("a", priority=7)
    with pytest.raises(errors.QuotaExceededError) as refused:
        cluster.job("b", priority=8)
    assert refused.value.code == "quota_exceeded"
    tenant(cluster, "t")
    cluster.job("a", priority=7)  # Said again, and known: it keeps what it was given.
    with pytest.raises(errors.InvalidRequestError):
        tenant(cluster, "t", priority_max=101)


def test_an_operators_jobs_may_have_any_priority() -> None:
    cluster = cluster_of()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t", is_operator=True))
    cluster.job("a", priority=100)
    with pytest.raises(errors.InvalidRequestError):
        cluster.job("b", priority=101)


def test_a_short_job_has_the_better_response_ratio() -> None:
    cluster = cluster_of()
    submit(cluster, "a", 4)
    submit(cluster, "long", 4, expected_s=7200.0)
    submit(cluster, "short", 4, expected_s=60.0)
    cluster.pass_time(60.0)
    end(cluster, "a")
    assert placed(cluster) == ["short/actor"]


def test_tenants_get_gpus_in_proportion_to_their_weights() -> None:
    """Both tenants always have a backlog."""
    cluster = cluster_of(8)
    tenant(cluster, "one", weight=1.0)
    tenant(cluster, "three", weight=3.0)
    held_s = {"one": 0.0, "three": 0.0}
    for index in range(16):
        submit(cluster, f"one-{index}", 1, tenant="one")
        submit(cluster, f"three-{index}", 1, tenant="three")
    for index in range(200):
        names = placed(cluster)
        assert len(names) == 8
        for each in names:
            held_s[each.split("-")[0]] += 10.0
        cluster.pass_time(10.0)
        job = names[index * 5 % 8].split("/")[0]
        end(cluster, job)
        submit(cluster, f"{job}+", 1, tenant=job.split("-")[0])
    assert held_s["three"] / held_s["one"] == pytest.approx(3.0, rel=0.1)


def test_gpus_freed_at_the_same_time_are_shared_by_weight() -> None:
    cluster = cluster_of(8)
    tenant(cluster, "one", weight=1.0)
    tenant(cluster, "three", weight=3.0)
    submit(cluster, "a", 8)
    for index in range(8):
        submit(cluster, f"one-{index}", 1, tenant="one")
        submit(cluster, f"three-{index}", 1, tenant="three")
    end(cluster, "a")
    assert [name.split("-")[0] for name in placed(cluster)] == ["one"] * 2 + ["three"] * 6


def test_jobs_over_quota_wait_with_a_reason_and_start_once_the_quota_allows() -> None:
    cluster = cluster_of(8)
    tenant(cluster, "t", jobs_max=1)
    submit(cluster, "a", 2)
    submit(cluster, "b", 2)
    cluster.submit("b:1", "b/actor", "barrier")
    assert placed(cluster) == ["a/actor"]
    explanation = cluster.explanation_of("b:1")
    assert explanation["rule"] == "quota"
    assert explanation["reason"] == "tenant 't' runs 1 jobs, its quota is 1"
    end(cluster, "a")
    assert placed(cluster) == ["b/actor"]
    tenant(cluster, "t", gpus_max=5)
    submit(cluster, "c", 4)
    assert "holds 2 GPUs, its quota is 5; this asks for 4" in rule_of(cluster, "c")
    submit(cluster, "d", 3)
    assert placed(cluster) == ["b/actor", "d/actor"]
    tenant(cluster, "t")
    end(cluster, "d")
    assert placed(cluster) == ["b/actor", "c/actor"]


def test_a_tenant_without_gpu_seconds_left_is_refused() -> None:
    cluster = cluster_of()
    tenant(cluster, "t", gpu_seconds_max=10.0)
    submit(cluster, "a", 4)
    cluster.settle()
    cluster.submit("a:1", "a/actor", "barrier")
    cluster.execute(cluster.runs[0])
    cluster.now += 3.0
    cluster.execute(cluster.runs[0])
    with pytest.raises(errors.QuotaExceededError, match="12 of its 10 GPU-seconds"):
        cluster.submit("a:2", "a/actor", "barrier")
    with pytest.raises(errors.QuotaExceededError):
        cluster.job("b")
    cluster.job("b", tenant="other")


def test_work_can_be_saved_although_no_gpu_seconds_are_left() -> None:
    cluster = cluster_of()
    tenant(cluster, "t", gpu_seconds_max=10.0)
    submit(cluster, "a", 4)
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    tenant(cluster, "t", gpu_seconds_max=0.0)
    for kind in ("forward", "forward_backward", "optim_step", "load_checkpoint", "barrier"):
        with pytest.raises(errors.QuotaExceededError, match="checkpoints can still be saved"):
            cluster.submit(f"a:{kind}", "a/actor", kind)
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.settle()
    assert cluster.state_of("a:save") == "finished"
    used = usage_view(cluster.core.cluster.state, None)
    saves = [row["operations"] for row in used if row["kind"] == "save_checkpoint"]
    assert saves == [1], "a save past the budget is billed like any other"


def test_small_jobs_pass_a_large_one_only_if_the_policy_backfills() -> None:
    for policy, wanted in (
        ("spread", ["a/actor"]),
        ("spread+backfill", ["a/actor", "small/actor"]),
        ("pack", ["a/actor", "small/actor"]),
    ):
        cluster = cluster_of(4, policy=policy)
        submit(cluster, "a", 2)
        submit(cluster, "large", 4)
        submit(cluster, "small", 1)
        assert placed(cluster) == wanted, policy


def test_without_reservations_no_job_passes_a_starving_one_for_free_gpus() -> None:
    cluster = cluster_of(4, policy="pack", reservations=False)
    submit(cluster, "a", 2)
    submit(cluster, "large", 4)
    cluster.pass_time(BOUND_S)
    submit(cluster, "small", 1)
    submit(cluster, "sharing", 2)
    assert placed(cluster) == ["a/actor", "sharing/actor"], "a group that exists may be joined"
    end(cluster, "a")
    end(cluster, "sharing")
    assert placed(cluster) == ["large/actor"]


def test_a_partial_job_gets_its_other_gpus_although_starving_jobs_block() -> None:
    cluster = cluster_of(4, policy="isolated")
    submit(cluster, "part", 1)
    submit(cluster, "hog", 3)
    submit(cluster, "large", 4)
    submit(cluster, "small", 2)
    cluster.deploy("part/reference", workers=2)
    cluster.pass_time(BOUND_S)
    assert placed(cluster) == ["hog/actor", "part/actor"]
    end(cluster, "hog")
    assert placed(cluster) == ["part/actor", "part/reference"]
    end(cluster, "part")
    assert placed(cluster) == ["large/actor"]


def test_a_starving_job_does_not_block_jobs_for_other_node_types() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.join_node(4, "x", node_type="x")
    cluster.join_node(4, "y", node_type="y")
    cluster.job("a")
    cluster.deploy("a/actor", workers=1, node_type="x")
    cluster.job("large")
    cluster.deploy("large/actor", workers=4, node_type="x")
    cluster.pass_time(BOUND_S)
    for job, node_type in (("b", "y"), ("c", "x"), ("d", "")):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=1, node_type=node_type)
    assert placed(cluster) == ["a/actor", "b/actor"]


def test_an_unknown_node_type_is_refused_with_the_existing_types() -> None:
    cluster = FakeCluster()
    cluster.join_node(4, "x", node_type="a100")
    cluster.job("a")
    with pytest.raises(
        errors.CapacityError, match="the cluster has a100: name one it has, or none"
    ):
        cluster.deploy("a/actor", workers=1, node_type="h200")
    cluster.deploy("a/actor", workers=1, node_type="a100")


def test_without_backfill_a_partial_job_is_completed_before_the_head_of_the_queue() -> None:
    cluster = cluster_of(4, policy="spread")
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout", workers=2)
    submit(cluster, "large", 4)
    cluster.deploy("a/actor", workers=2)
    assert placed(cluster) == ["a/actor", "a/rollout"]


arrivals = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(-1, 1),
        st.sampled_from(("train", "rollout")),
        st.sampled_from((0, 0, 2)),
        st.sampled_from((1.0, 100.0, 400.0)),
    ),
    min_size=1,
    max_size=25,
)


class Watched(FakeCluster):
    """Asserts after every event that no deployment of the same or a lower class got free GPUs
    before a starving one; all belong to one tenant."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.created_at: dict[str, float] = {}
        self.priority: dict[str, int] = {}

    def send(self, event: ev.Event) -> list[cmd.Command]:
        if isinstance(event, ev.DeploymentCreated):
            self.created_at[event.deployment] = self.now
        if isinstance(event, ev.JobSubmitted):
            self.priority[event.job] = event.priority
        groups = {group["group"] for group in self.core.list_groups(self.now)}
        held = {name.split("/")[0] for name in placed(self)}
        commands = super().send(event)
        views = [d for job in self.core.list_jobs(None, self.now) for d in job["deployments"]]
        starving = [
            view["deployment"]
            for view in views
            if view["state"] == "waiting"
            and self.now - self.created_at[view["deployment"]] >= BOUND_S
        ]
        for group in self.core.list_groups(self.now):
            first = group["members"][0]
            if group["group"] in groups or first.split("/")[0] in held:
                continue
            priority = self.priority[first.split("/")[0]]
            passed = [each for each in starving if self.priority[each.split("/")[0]] >= priority]
            waited_s = self.now - self.created_at[first]
            assert waited_s >= BOUND_S or not passed, f"{first} came past {passed}"
        return commands


@given(st.sampled_from(("isolated", "pack", "spread", "spread+backfill")), arrivals, st.data())
def test_in_any_history_without_reservations_none_passes_a_starving_deployment(
    policy: str, wishes: list[tuple[int, int, str, int, float]], data: st.DataObject
) -> None:
    cluster = Watched(policy=policy, starvation_bound_s=BOUND_S, reservations=False)
    cluster.start_node(6)
    gangs = set()
    for index, (workers, priority, kind, gang, pause_s) in enumerate(wishes):
        job = f"j{index}"
        is_gang = gang > 0 and workers <= 3
        cluster.job(job, priority=priority, gang=gang if is_gang else 0)
        cluster.deploy(f"{job}/one", kind, workers=workers)
        if is_gang:
            cluster.deploy(f"{job}/two", kind, workers=workers)
            gangs.add(job)
        cluster.pass_time(pause_s)
        if data.draw(st.booleans()) and placed(cluster):
            end(cluster, data.draw(st.sampled_from(placed(cluster))).split("/")[0])
    for _ in wishes:
        held = {each.split("/")[0] for each in placed(cluster)}
        for job in held & gangs:
            assert {f"{job}/one", f"{job}/two"} <= set(placed(cluster))
        for job in sorted(held):
            end(cluster, job)
    live = [job["job"] for job in cluster.core.list_jobs(None, cluster.now) if not job["ended_at"]]
    assert not live, "somebody never gets GPUs"


def test_a_restored_scheduler_has_displaced_deployments_in_the_same_queues() -> None:
    cluster = FakeCluster(policy="isolated", searches_max=1, node_replace_s=0.0)
    for node in ("n1", "n2"):
        cluster.join_node(2, node=node)
    cluster.join_router()
    cluster.job("a")
    cluster.deploy("a/actor", workers=2)
    cluster.job("b")
    cluster.deploy("b/actor", workers=2)
    trace = DemandTrace(period_s=60.0, segments=(Segment(offset_s=0.0, duration_s=15.0),))
    # It waits while its job has GPUs, and goes on when that has lost them.
    cluster.deploy("a/critic", workers=2, trace=trace)
    node = cluster.core.deployment_view("a/actor", cluster.now)["ranks"][0]["node"]
    cluster.lose_node(node)
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    event = ev.TenantConfigured(
        tenant="t", weight=1.0, jobs_max=None, gpus_max=None, gpu_seconds_max=None
    )
    cluster.send(ev.TenantCreated(tenant="t", key_digest="k"))
    restored.handle(ev.TenantCreated(tenant="t", key_digest="k"), cluster.now)
    assert cluster.send(event) == restored.handle(event, cluster.now)
    assert cluster.core.dump() == restored.dump()


def test_scarcity_checks_one_deployment_of_each_kind_in_a_backlog_over_quota() -> None:
    cluster = FakeCluster(policy="spread+backfill")
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="k"))
    cluster.send(
        ev.TenantConfigured(tenant="t", weight=1.0, jobs_max=None, gpus_max=2, gpu_seconds_max=None)
    )
    for number in range(30):
        cluster.job(f"j{number}", expected_s=100.0 + number)
        cluster.deploy(f"j{number}/actor", workers=2)
    context = cluster.core._context
    waiting = context.cluster.queues.waiting
    assert len(waiting) == 29
    # Of all these the first two are looked at.
    assert [len(tenants) for tenants in waiting.pending_by_tenant.values()] == [1]
    # Nobody of them may have the two GPUs that are left, or those that have none.
    placed, waits = (context.state.deployment(DeploymentId(f"j{n}/actor")) for n in (0, 29))
    assert not is_scarce(context.cluster, placed)
    assert not is_scarce(context.cluster, waits)
    cluster.job("other", tenant="other")
    cluster.deploy("other/actor", workers=4)
    assert is_scarce(context.cluster, placed)


def test_equal_deployments_are_searched_and_counted_once() -> None:
    cluster = FakeCluster(
        policy="spread+backfill", searches_max=2, overlap_max=0.1, horizon_slots=1000
    )
    cluster.start_node(2)
    for tenant in ("t0", "t1", "t2", "t3", "t4"):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))

    def come(job: str, tenant: str, busy_s: float, period_s: float) -> None:
        segment = Segment(offset_s=0.0, duration_s=busy_s)
        cluster.job(job, tenant)
        demand = DemandTrace(period_s=period_s, segments=(segment,))
        cluster.deploy(f"{job}/actor", workers=2, trace=demand)

    come("resident", "t0", 40.0, 100.0)
    for index in (1, 2, 3):
        # There is load left for it, and no gap that is long enough.
        come(f"waits{index}", f"t{index}", 10.0, 25.0)
    cluster.send(
        ev.TenantConfigured(
            tenant="t4", weight=1.0, jobs_max=None, gpus_max=None, gpu_seconds_max=None
        )
    )
    come("fits", "t4", 10.0, 100.0)
    views = {job["job"]: job["deployments"][0] for job in cluster.core.list_jobs(None, cluster.now)}
    assert [name for name, view in views.items() if view["group"]] == ["resident", "fits"]
