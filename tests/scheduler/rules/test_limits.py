"""Numbers from outside: those out of proportion are refused or cut, and leave the core sound."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plexrl import errors
from plexrl.ids import JobId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.views import usage_view
from plexrl.scheduler.rules.config import RANGES as CONFIG_RANGES
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.limits import BYTES_MAX, RANGES, TOKENS_MAX
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.operations import OperationKind
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster, config

HUGE = 1 << 65
TRACE = DemandTrace(period_s=10.0, segments=(Segment(offset_s=0.0, duration_s=1.0),))


def cluster_with_a_job() -> FakeCluster:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="k"))
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.settle()
    return cluster


def requests() -> list[ev.Event]:
    """One of each event that carries numbers of a caller's."""
    return [
        ev.NodeJoined(
            node="m",
            gpus=1,
            gpu_memory_bytes=1,
            host_memory_bytes=1,
            nvme_bytes=1,
            statemanager="s",
        ),
        ev.TenantConfigured(
            tenant="t", weight=1.0, jobs_max=1, gpus_max=8, gpu_seconds_max=1.0, priority_max=0
        ),
        ev.JobSubmitted(
            job="b", tenant="t", name="b", controller_timeout_s=1.0, reattach_timeout_s=1.0
        ),
        ev.DeploymentCreated(
            deployment="a/second",
            job="a",
            kind="train",
            workers=1,
            state_bytes=1,
            exclusive=False,
            spec_json="{}",
            trace=TRACE,
        ),
        ev.OperationSubmitted(
            operation="o",
            deployment="a/actor",
            kind=OperationKind.FORWARD,
            params=None,
            deadline_s=1.0,
        ),
    ]


def numbers(event: ev.Event) -> Iterator[str]:
    """Names of the fields that may hold a number."""
    for name, hint in get_type_hints(type(event)).items():
        if hint in (int, float, int | None, float | None):
            yield name


@pytest.mark.parametrize(
    ("event", "name", "value"),
    [
        (event, name, value)
        for event in requests()
        for name in numbers(event)
        for value in (-1, HUGE, math.nan, math.inf, -math.inf)
        # A priority may be below 0.
        if not (name in ("priority", "priority_max") and value == -1)
    ],
    ids=lambda each: str(each) if isinstance(each, str | int | float) else type(each).__name__,
)
def test_a_number_out_of_all_proportion_is_refused_without_a_trace(
    event: ev.Event, name: str, value: float
) -> None:
    cluster = cluster_with_a_job()
    before = cluster.core.dump()
    with pytest.raises(errors.InvalidRequestError, match=name):
        cluster.core.handle(msgspec.structs.replace(event, **{name: value}), cluster.now)
    assert cluster.core.dump() == before


def test_every_number_of_a_request_has_a_range() -> None:
    checked_elsewhere = {"weight", "priority", "priority_max", "deadline_s"}
    for event in requests():
        ranges = {name for name, _, _ in RANGES[type(event)]}
        assert set(numbers(event)) <= ranges | checked_elsewhere, type(event).__name__


@pytest.mark.parametrize(
    "changes",
    [{"jitter_s": 1e300}, {"cycles": -1}, {"cycles": HUGE}],
    ids=str,
)
def test_a_trace_out_of_all_proportion_is_refused(changes: dict[str, Any]) -> None:
    fields_of = {"period_s": 10.0, "segments": TRACE.segments, **changes}
    cluster = cluster_with_a_job()
    with pytest.raises(errors.InvalidRequestError, match="demand trace"):
        cluster.deploy("a/second", workers=1, trace=DemandTrace(**fields_of))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.floats(1e-3, 1e9),
            st.floats(0.0, 1.0),
            st.floats(0.0, 1.0),
            st.floats(0.0, 1e6),
            st.floats(0.0, 1e6),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_trace_that_is_accepted_is_placed_or_explained(
    demands: list[tuple[float, float, float, float, float]],
) -> None:
    cluster = FakeCluster(policy="spread+backfill", waiting_part_max=1.0, load_max=8.0)
    cluster.start_node(2)
    for index, (period_s, offset, busy, slack, jitter) in enumerate(demands):
        offset_s = offset * period_s
        segment = Segment(
            offset_s=offset_s,
            duration_s=busy * (period_s - offset_s) * (1.0 - 1e-12),
            slack_s=slack * period_s,
        )
        trace = DemandTrace(period_s=period_s, segments=(segment,), jitter_s=jitter * period_s)
        cluster.job(f"j{index}")
        cluster.deploy(f"j{index}/actor", trace=trace)
        cluster.pass_time(1.0)
    for job in cluster.core.list_jobs(None, cluster.now):
        (deployment,) = cluster.core.explain_job(job["job"], cluster.now)["deployments"]
        if deployment["group"] is None:
            assert deployment["attempts"], "nobody says why it waits"
        else:
            placement = deployment["placement"]
            assert placement is not None
            assert placement["group"] == deployment["group"]
            assert placement["shift_s"] is not None, "its operator asks"
            assert 0 <= placement["shift_s"] < cluster.config.horizon_slots
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    assert restored.list_groups(cluster.now) == cluster.core.list_groups(cluster.now)


def test_sums_of_tokens_stay_writable() -> None:
    cluster = cluster_with_a_job()
    for index in range(6):
        cluster.submit(f"o{index}", "a/actor", "forward", tokens=TOKENS_MAX)
        cluster.settle()
    job = cluster.core._context.state.jobs[JobId("a")]
    job.usage[OperationKind.FORWARD].tokens = (1 << 62) - 5
    cluster.submit("last", "a/actor", "forward", tokens=TOKENS_MAX)
    cluster.settle()
    (row,) = [
        row for row in usage_view(cluster.core.cluster.state, None) if row["kind"] == "forward"
    ]
    assert row["tokens"] == (1 << 62) - 1
    SchedulerCore.restore(cluster.config, cluster.core.dump())


@pytest.mark.parametrize(
    "changes",
    [
        {"compute_s": -1.0},
        {"compute_s": 1e300},
        {"compute_s": math.nan},
        {"transfer_s": -1.0},
        {"result_bytes": HUGE},
        {"result_bytes": -1},
        {"moved": ev.StateMoved(bytes_moved=HUGE, tier="host")},
        {"moved": ev.StateMoved(bytes_moved=1, tier="host", prefetched_bytes=HUGE)},
        {"moved": ev.StateMoved(bytes_moved=1, tier="host", prefetch_s=math.nan)},
    ],
    ids=str,
)
def test_a_report_counts_whatever_it_has_measured(changes: dict[str, Any]) -> None:
    cluster = cluster_with_a_job()
    cluster.submit("o", "a/actor", "forward")
    while cluster.runs:
        run = cluster.runs.pop(0)
        report = ev.OperationFinished(operation=run.operation, token=run.token, compute_s=0.1)
        cluster.send(msgspec.structs.replace(report, **changes))
    assert cluster.state_of("o") == "finished"
    compute_s = cluster.core.operation_view("o", cluster.now)["compute_s"]
    assert compute_s is not None
    assert compute_s >= 0.0
    cluster.core.dump()


@pytest.mark.parametrize(("nvme_bytes", "shown"), [(HUGE, BYTES_MAX), (7, 7), (-1, 0)])
def test_a_reported_size_is_shown_within_bounds(nvme_bytes: int, shown: int) -> None:
    cluster = cluster_with_a_job()
    state = ev.StateResidency(deployment="a/actor", host_bytes=HUGE, nvme_bytes=nvme_bytes)
    cluster.send(ev.StateReported(node="n", states=(state,)))
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    for core in (cluster.core, restored):
        assert core.deployment_view("a/actor", cluster.now)["nvme_bytes"] == shown


def numeric_settings() -> list[str]:
    hints = get_type_hints(SchedulerConfig)
    wanted = (int, float, int | None, float | None)
    return [each.name for each in fields(SchedulerConfig) if hints[each.name] in wanted]


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
@pytest.mark.parametrize("name", numeric_settings())
def test_a_setting_that_is_no_number_of_its_kind_is_refused(name: str, value: float) -> None:
    with pytest.raises(errors.InvalidRequestError, match=name):
        config(**{name: value})


def test_every_numeric_setting_has_a_range() -> None:
    assert set(numeric_settings()) == set(CONFIG_RANGES)
