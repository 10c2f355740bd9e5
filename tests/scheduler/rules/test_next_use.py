"""Commands carry the predicted next use of a WPG's state."""

import msgspec
import pytest

from plexrl.ids import OperationId
from plexrl.scheduler.rules.next_use import is_overdue, next_use_s
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.deployment.burst import Burst
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.deployment.work import DeploymentWork
from plexrl.scheduler.state.records import Deployment
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster

TRACE = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=20.0),))


def member(work: DeploymentWork | None = None, **demand: object) -> Deployment:
    estimates = {"estimates": Estimates(state_bytes=1)}
    return Deployment(
        deployment="j/a",
        job="j",
        created_at=0.0,
        spec=RequestedSpec(kind="train", workers=1, state_bytes=1, exclusive=False, spec_json="{}"),
        work=work or DeploymentWork(),
        demand=Demand(**estimates | demand),
    )


def thinks(seconds: float) -> Estimates:
    return Estimates(state_bytes=1, think_seconds=seconds)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"burst": Burst(ended_at=90.0)}, None),
        ({"estimates": thinks(30.0)}, None),
        ({"estimates": thinks(30.0), "burst": Burst(ended_at=90.0)}, 20.0),
        ({"estimates": thinks(8.0), "burst": Burst(ended_at=90.0)}, 0.0),
        ({"estimates": thinks(1.0), "burst": Burst(ended_at=90.0)}, None),
        ({"trace": TRACE, "burst": Burst(ended_at=90.0)}, 70.0),
        ({"trace": TRACE, "estimates": thinks(30.0), "burst": Burst(ended_at=90.0)}, 20.0),
        ({"estimates": thinks(30.0), "burst": Burst(started_at=80.0, idle_since=95.0)}, 25.0),
        (
            {
                "estimates": thinks(30.0),
                "burst": Burst(ended_at=90.0),
                "work": DeploymentWork(queue=[OperationId("o")]),
            },
            0.0,
        ),
    ],
)
def test_a_state_is_needed_its_usual_pause_after_the_last_burst(
    fields: dict[str, object], expected: float | None
) -> None:
    assert next_use_s(member(**fields), 100.0) == expected


def test_an_offload_carries_the_next_use_of_the_state() -> None:
    cluster = FakeCluster(ordering="fifo-bursts", policy="pack")
    cluster.start_node(gpus=2)
    for name in ("one", "two"):
        cluster.job(name)
        cluster.deploy(f"{name}/a")
    for launch in list(cluster.launches):
        cluster.launch(launch)
    said: list[float | None] = []
    for step in range(4):
        for name in ("one/a", "two/a"):
            cluster.submit(f"{name}-{step}", name, "optim_step")
            while cluster.runs:
                run = cluster.runs[0]
                if run.kind == OperationKind.OFFLOAD:
                    said.append(run.next_use_s)
                else:
                    assert not hasattr(run, "next_use_s")
                cluster.execute(run)
            cluster.pass_time(60.0)
    # Nothing is known of a pause before there was one; then each comes back every 120 s.
    assert len(said) >= 5
    assert said[0] is None
    assert said[-1] is not None
    assert 30.0 <= said[-1] <= 120.0


def test_commands_of_older_journals_are_read() -> None:
    run = cmd.PrefetchState(deployment="j/a", seq=1, nodes=("n",))
    plain = msgspec.to_builtins(run)
    del plain["next_use_s"]
    assert msgspec.convert(plain, cmd.PrefetchState) == run


def test_a_member_that_is_late_by_more_than_half_its_pause_is_not_expected() -> None:
    assert not is_overdue(-15.0, 30.0)
    assert is_overdue(-15.5, 30.0)
