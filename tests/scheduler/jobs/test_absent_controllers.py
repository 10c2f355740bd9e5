"""A job without a controller ends when it is due, whether or not a scheduler runs meanwhile."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.live_service import OPERATOR, job_of, live, run_live

TIMEOUT_S, REATTACH_S = 10.0, 100.0


def cluster_with_job() -> FakeCluster:
    cluster = FakeCluster()
    cluster.send(
        ev.JobSubmitted(
            job="a",
            tenant="t",
            name="a",
            controller_timeout_s=TIMEOUT_S,
            reattach_timeout_s=REATTACH_S,
        )
    )
    return cluster


def restart_after(cluster: FakeCluster, seconds: float, *, restored: bool) -> None:
    """No scheduler runs for a while."""
    cluster.now += seconds
    cluster.restart_scheduler(restored=restored)


def state(cluster: FakeCluster) -> str:
    return str(cluster.core.job_view("a", cluster.now)["state"])


@pytest.mark.parametrize("restored", [False, True])
def test_restarts_do_not_renew_the_time_of_a_detached_job(restored: bool) -> None:
    cluster = cluster_with_job()
    cluster.send(ev.JobFinished(job="a", outcome="detached"))
    for _ in range(4):
        restart_after(cluster, REATTACH_S / 5, restored=restored)
        assert state(cluster) == "QUEUED"
    restart_after(cluster, REATTACH_S / 5, restored=restored)
    assert state(cluster) == "CANCELLED"
    assert "did not come back" in cluster.core.job_view("a", cluster.now)["reason"]


def test_a_detached_job_ends_at_its_time_after_a_restart() -> None:
    cluster = cluster_with_job()
    cluster.send(ev.JobFinished(job="a", outcome="detached"))
    restart_after(cluster, REATTACH_S / 2, restored=False)
    cluster.pass_time(REATTACH_S / 2 - 1)
    assert state(cluster) == "QUEUED"
    cluster.pass_time(1)
    assert state(cluster) == "CANCELLED"


@pytest.mark.parametrize("restored", [False, True])
def test_a_controller_that_waited_for_the_scheduler_keeps_its_job(restored: bool) -> None:
    cluster = cluster_with_job()
    restart_after(cluster, 10 * REATTACH_S, restored=restored)
    cluster.pass_time(TIMEOUT_S - 1)
    assert cluster.core.job_view("a", cluster.now)["attached"]
    cluster.send(ev.ControllerSeen(job="a"))
    cluster.pass_time(TIMEOUT_S - 1)
    assert cluster.core.job_view("a", cluster.now)["attached"]


@pytest.mark.parametrize("from_job_key", [False, True])
def test_only_the_controllers_own_operations_show_that_it_lives(from_job_key: bool) -> None:
    cluster = cluster_with_job()
    cluster.start_node()
    cluster.deploy("a/actor", "rollout")
    cluster.pass_time(TIMEOUT_S - 1)
    cluster.submit("a:0", "a/actor", "generate", from_job_key=from_job_key)
    cluster.pass_time(TIMEOUT_S - 1)
    assert cluster.core.job_view("a", cluster.now)["attached"] is not from_job_key


def test_a_controller_that_is_away_after_a_long_outage_has_no_second_time() -> None:
    cluster = cluster_with_job()
    restart_after(cluster, 10 * REATTACH_S, restored=False)
    cluster.pass_time(TIMEOUT_S)
    assert state(cluster) == "CANCELLED"


def test_who_reports_a_former_script_as_gone_does_not_renew_its_time() -> None:
    cluster = cluster_with_job()
    restart_after(cluster, REATTACH_S, restored=False)
    cluster.send(ev.JobFinished(job="a", outcome="detached"))
    assert state(cluster) == "QUEUED"
    cluster.send(ev.JobFinished(job="a", outcome="detached"))
    cluster.pass_time(TIMEOUT_S)
    assert state(cluster) == "CANCELLED"


@given(
    st.lists(st.tuples(st.floats(0.1, 40.0), st.sampled_from(["pass", "down", "report"]))),
    st.booleans(),
)
def test_no_history_of_restarts_delays_the_end(
    steps: list[tuple[float, str]], restored: bool
) -> None:
    cluster = cluster_with_job()
    began_at = cluster.now
    cluster.send(ev.JobFinished(job="a", outcome="detached"))
    for seconds, step in steps:
        if step == "pass":
            cluster.pass_time(seconds)
        elif step == "down":
            restart_after(cluster, seconds, restored=restored)
        else:
            cluster.send(ev.JobFinished(job="a", outcome="detached"))
        is_due = cluster.now >= began_at + REATTACH_S
        assert (state(cluster) == "CANCELLED") == is_due


def test_a_scheduler_that_starts_late_ends_a_job_that_was_due(tmp_path: Path) -> None:
    due_s = 0.5

    async def talk() -> None:
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            await router.call("submit_job", {**job_of("a", "j"), "reattach_timeout_s": due_s})
            await router.call("submit_job", job_of("a", "k"))
            for job in ("j", "k"):
                await router.call("finish_job", {**OPERATOR, "job": job, "outcome": "detached"})
        # The time passes for the wall clock alone.
        await asyncio.sleep(due_s)
        async with live(tmp_path) as cluster:
            router = await cluster.router()
            found = {
                job: (await router.call("get_job", {**OPERATOR, "job": job}))["state"]
                for job in ("j", "k")
            }
        assert found == {"j": "CANCELLED", "k": "QUEUED"}

    run_live(talk)
