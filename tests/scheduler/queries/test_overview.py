"""An operator's page: GPUs by state, lanes, queue, shares, and where the time of a job went."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId, JobId, NodeId, TenantId
from plexrl.scheduler.accounting.fair_shares import tenant_share
from plexrl.scheduler.admission.order import admission_key
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import is_possible
from plexrl.scheduler.placement.waiting.unit_table import ROWS_MIN
from plexrl.scheduler.queries.overview import possible
from plexrl.scheduler.queries.overview.gpu_states import memory_of, overview, total
from plexrl.scheduler.queries.overview.job_times import TimesReader
from plexrl.scheduler.queries.overview.queue import page, row
from plexrl.scheduler.queries.overview.shares import Bills
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.messages.overview_views import (
    QueuedView,
)
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.queries.shared_group import two_jobs_on_one_group

T, U = TenantId("t"), TenantId("u")


def states(cluster: FakeCluster, tenant: TenantId | None = None) -> dict[str, int]:
    return overview(cluster.core.cluster, tenant, cluster.now)["gpus"]["states"]


def queue(cluster: FakeCluster, which: str, tenant: TenantId | None = None) -> list[QueuedView]:
    core = cluster.core.cluster
    _, entries = page(core, which, tenant, cluster.now, (0, 100))
    rows = [row(core, entry, cluster.now, sees_all=tenant is None) for entry in entries]
    return [each for each in rows if each is not None]


def test_each_gpu_is_in_one_state() -> None:
    cluster = two_jobs_on_one_group()
    assert states(cluster) == {"idle": 2, "free": 2}
    cluster.submit("a:2", "a/actor", "forward")
    cluster.pass_time(1.0)
    assert states(cluster) == {"switching": 2, "free": 2}
    while cluster.runs and cluster.runs[0].kind != "forward":
        cluster.execute(cluster.runs[0])
    assert states(cluster) == {"computing": 2, "free": 2}
    cluster.join_node(2, "m")
    cluster.send(ev.NodeDrainChanged(node="m", is_draining=True))
    assert states(cluster) == {"computing": 2, "free": 2, "draining": 2}
    cluster.send(ev.NodeLost(node="m"))
    assert states(cluster) == {"computing": 2, "free": 2, "lost": 2}


def test_bytes_of_states_are_told_by_tier_and_to_their_tenant_only() -> None:
    cluster = two_jobs_on_one_group()
    state = cluster.core.cluster.state
    size = state.deployments[DeploymentId("a/actor")].spec.state_bytes
    of_b = overview(cluster.core.cluster, U, cluster.now)["memory"]
    assert of_b["gpu"] == size
    (a,) = memory_of(state, state.jobs[JobId("a")])
    assert a["bytes"] == {"gpu": 0, "host": size, "nvme": 0}
    cluster.send(
        ev.StateReported(
            node=NodeId("n"),
            states=(
                ev.StateResidency(
                    deployment=DeploymentId("a/actor"), host_bytes=size - 7, nvme_bytes=7
                ),
            ),
        )
    )
    (a,) = memory_of(state, state.jobs[JobId("a")])
    assert a["bytes"] == {"gpu": 0, "host": size - 7, "nvme": 7}
    of_all = overview(cluster.core.cluster, None, cluster.now)["memory"]
    own = [overview(cluster.core.cluster, each, cluster.now)["memory"] for each in (T, U)]
    assert of_all == total(own)


def test_gpus_are_counted_by_block_of_nodes() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.join_node(4, "n", block="row1/rack1")
    cluster.join_node(4, "m", block="row1/rack2")
    cluster.join_node(2, "o", block="row1/rack2")
    cluster.join_router()
    cluster.job("a")
    cluster.deploy("a/actor", workers=4)
    cluster.settle()
    blocks = overview(cluster.core.cluster, None, cluster.now)["blocks"]
    assert [(each["block"], each["gpus"]) for each in blocks] == [
        ("row1/rack1", 4),
        ("row1/rack2", 6),
    ]
    assert sum(each["states"].get("free", 0) for each in blocks) == 6


def test_a_tenant_does_not_see_what_another_tenants_job_does() -> None:
    cluster = two_jobs_on_one_group()
    cluster.submit("b:2", "b/actor", "forward")
    cluster.submit("a:2", "a/actor", "forward")
    assert states(cluster) == {"computing": 2, "free": 2}
    assert states(cluster, U) == {"computing": 2, "free": 2}
    assert states(cluster, T) == {"others": 2, "free": 2}
    assert states(cluster, TenantId("v")) == {"others": 2, "free": 2}
    assert overview(cluster.core.cluster, TenantId("v"), cluster.now)["groups"] == 0


def test_counts_of_what_waits_agree_with_the_lists() -> None:
    cluster = two_jobs_on_one_group()
    cluster.job("c", "t")
    cluster.deploy("c/actor", workers=4)
    cluster.submit("b:2", "b/actor", "forward")
    cluster.submit("a:2", "a/actor", "forward")
    cluster.pass_time(5.0)
    for tenant, waiting, turns in ((None, 1, 1), (T, 1, 1), (U, 0, 0)):
        view = overview(cluster.core.cluster, tenant, cluster.now)
        assert (view["waiting"], view["turns"]) == (waiting, turns)
        assert len(queue(cluster, "gpus", tenant)) == waiting
        assert len(queue(cluster, "turns", tenant)) == turns
        assert (view["waiting_since"] is None) == (waiting == 0)
    (turn,) = queue(cluster, "turns")
    assert (turn["job"], turn["operation"], turn["blocker"]) == ("a", "a:2", "b/actor")
    (own,) = queue(cluster, "turns", T)
    assert own["blocker"] == "another tenant's job"


def test_a_tenant_may_list_more_turns_than_the_table_of_waiting_units_has_rows() -> None:
    count = ROWS_MIN + 6
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(count)
    for index in range(count):
        name = f"j{index:02}"
        cluster.job(name, "t" if index % 2 else "u")
        cluster.deploy(f"{name}/actor", workers=1)
        cluster.submit(f"{name}:1", f"{name}/actor", "forward")
    assert len(queue(cluster, "turns")) == count
    assert len(queue(cluster, "turns", T)) == len(queue(cluster, "turns", U)) == count // 2
    assert queue(cluster, "turns", TenantId("v")) == []


def test_a_deployment_that_the_nodes_cannot_hold_is_in_a_list_of_its_own() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(4)
    cluster.join_node(4, "m")
    cluster.job("a")
    cluster.deploy("a/actor", workers=8)
    cluster.job("b")
    cluster.deploy("b/actor", workers=8)
    cluster.job("c")
    cluster.deploy("c/actor", workers=4)
    cluster.send(ev.NodeDrainChanged(node="m", is_draining=True))
    core = cluster.core.cluster
    never = [each["job"] for each in queue(cluster, "impossible")]
    others = [each["job"] for each in queue(cluster, "gpus")]
    for name in core.queues.waiting:
        job = core.state.deployments[name].job
        assert job in (others if is_possible(core, core.state.deployments[name]) else never)
    assert set(never) <= {"a", "b"}
    assert all(each["rule"] == "impossible" for each in queue(cluster, "impossible"))
    view = overview(core, None, cluster.now)
    assert (view["impossible"], view["waiting"]) == (len(never), len(others))
    assert never
    cluster.end("c/actor")
    view = overview(core, None, cluster.now)
    assert (view["waiting"], view["waiting_since"]) == (0, None)


def test_a_page_of_gangs_asks_once_for_each_need(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(policy="pack")
    cluster.start_node(4)
    for index in range(30):
        cluster.job(f"j{index:02}", gang=2, expected_s=100.0 + index)
        cluster.deploy(f"j{index:02}/actor", workers=2)
        cluster.deploy(f"j{index:02}/other", workers=2)
    assert len(queue(cluster, "gpus")) > 40
    asked = []

    def ask(core: Cluster, deployment: Deployment) -> bool:
        asked.append(deployment.deployment)
        return is_possible(core, deployment)

    monkeypatch.setattr(possible, "is_possible", ask)
    page(cluster.core.cluster, "gpus", None, cluster.now, (0, 10))
    assert len(asked) == 1


def test_nothing_is_impossible_until_the_agents_have_connected_after_a_start() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(4)
    for job in "ab":
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=4)
    cluster.settle()
    assert [each["job"] for each in queue(cluster, "gpus")] == ["b"]

    def counts() -> tuple[int, int]:
        view = overview(cluster.core.cluster, None, cluster.now)
        return view["waiting"], view["impossible"]

    cluster.send(ev.SchedulerStarted())
    assert counts() == (1, 0)
    assert queue(cluster, "impossible") == []
    (waits,) = queue(cluster, "gpus")
    assert (waits["job"], waits["rule"] == "impossible") == ("b", False)
    cluster.send(ev.NodeLost(node="n"))
    assert counts() == (0, 1)
    assert [each["job"] for each in queue(cluster, "impossible")] == ["b"]


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("tuv"), st.integers(1, 4), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_the_queue_is_in_the_order_of_admission(
    jobs: list[tuple[str, int, int, bool]],
) -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(5)
    for tenant in "tuv":
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
        configured = ev.TenantConfigured(
            tenant=tenant,
            weight=1.0,
            jobs_max=None,
            gpus_max=None,
            gpu_seconds_max=None,
            priority_max=2,
        )
        cluster.send(configured)
    for index, (tenant, workers, priority, has_two) in enumerate(jobs):
        cluster.job(f"j{index}", tenant, priority=priority)
        cluster.deploy(f"j{index}/actor", workers=workers)
        if has_two:
            cluster.deploy(f"j{index}/other", workers=1)
        cluster.pass_time(7.0)
    core = cluster.core.cluster

    def key(name: DeploymentId) -> object:
        tenant = core.state.jobs[core.state.deployments[name].job].tenant
        share = tenant_share(core.holdings, tenant, cluster.now)
        return admission_key(core, core.state.deployments[name], share, cluster.now)

    expected = sorted(
        (name for name in core.queues.waiting if is_possible(core, core.state.deployments[name])),
        key=key,
    )
    total, entries = page(core, "gpus", None, cluster.now, (0, 100))
    # Members of a unit are placed in the order of their sizes.
    job_of = {name: core.state.deployments[name].job for name in expected}
    assert [job_of[name] for _, name in entries] == [job_of[name] for name in expected]
    assert total == len({position for position, _ in entries})
    for tenant in "tuv":
        _, own = page(core, "gpus", TenantId(tenant), cluster.now, (0, 100))
        of_tenant = [
            entry
            for entry in entries
            if core.state.jobs[core.state.deployments[entry[1]].job].tenant == tenant
        ]
        assert own == of_tenant


def test_shares_add_up_and_a_tenant_sees_itself() -> None:
    cluster = two_jobs_on_one_group()
    for tenant, weight in (("t", 1.0), ("u", 3.0)):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
        configured = ev.TenantConfigured(
            tenant=tenant, weight=weight, jobs_max=None, gpus_max=8, gpu_seconds_max=None
        )
        cluster.send(configured)
    core = cluster.core.cluster
    bills = Bills()
    bills.add(core.state.jobs.values())
    rows = {each["tenant"]: each for each in bills.views(core, None, cluster.now)}
    assert (rows[T]["due"], rows[U]["due"]) == (0.25, 0.75)
    assert sum(each["held"] for each in rows.values()) == 1.0
    assert rows[T]["gpus_max"] == 8
    operations = sum(
        row.operations for job in core.state.jobs.values() for row in job.usage.values()
    )
    assert sum(each["operations"] for each in rows.values()) == operations
    used = [row for job in core.state.jobs.values() for row in job.usage.values()]
    remembered = sum(each["remembered_gpu_seconds"] for each in rows.values())
    assert remembered == sum(row.gpu_seconds for row in used) > 0.0
    assert [each["tenant"] for each in bills.views(core, U, cluster.now)] == [U]


def test_the_times_of_a_job_are_sums_over_its_operations() -> None:
    cluster = two_jobs_on_one_group()
    cluster.submit("a:2", "a/actor", "forward")
    cluster.settle()
    state = cluster.core.cluster.state
    reader = TimesReader(state, state.jobs[JobId("a")])
    for _ in reader.steps(lambda: cluster.core.cluster):
        pass
    rows = {(each["deployment"], each["kind"]): each for each in reader.view(state)["rows"]}
    logged = [
        operation
        for operation in (state.operations[name] for name in state.finished.values())
        if operation.deployment == "a/actor"
    ]
    assert sum(each["operations"] for each in rows.values()) == len(logged)
    forward = [each for each in logged if each.kind == "forward"]
    found = rows[DeploymentId("a/actor"), "forward"]
    assert found["queue_s"] == sum(each.queue_s or 0.0 for each in forward)
    assert found["switch_s"] == sum(each.switch_s for each in forward)
    assert found["compute_s"] == sum(each.compute_s or 0.0 for each in forward)
