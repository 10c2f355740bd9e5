"""How a controller ends its job or detaches from it."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import plexrl
from plexrl.client.calls.transport import Transport
from plexrl.client.display.cluster_location import ClusterLocation
from plexrl.errors import ConnectionLostError
from tests.client.fake_router import FakeRouter


@pytest.fixture
def cluster(router: FakeRouter) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(router.url, "key", timeout_s=5.0) as connected:
        yield connected


def test_detaching_is_reported_to_the_cluster(cluster: plexrl.Cluster, router: FakeRouter) -> None:
    with cluster.create_job("j") as job:
        job.detach()
    assert router.bodies["/v1/jobs/j/finish"]["outcome"] == "detached"


def test_an_error_after_detaching_does_not_end_the_job(
    cluster: plexrl.Cluster, router: FakeRouter
) -> None:
    job = cluster.create_job("j")

    def detaches_and_fails() -> None:
        with job:
            job.detach()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        detaches_and_fails()
    assert router.bodies["/v1/jobs/j/finish"]["outcome"] == "detached"


def test_a_reader_of_a_job_does_not_detach_it(cluster: plexrl.Cluster, router: FakeRouter) -> None:
    cluster.attach_job("j", heartbeat=False).detach()
    assert "/v1/jobs/j/finish" not in router.bodies


def test_an_unreachable_cluster_does_not_block_detaching(
    cluster: plexrl.Cluster, router: FakeRouter
) -> None:
    job = cluster.create_job("j")
    router.faults = ["unavailable"]
    job.detach()
    assert job.left.is_set()


def test_a_cancelled_job_is_ended_with_its_reason(
    cluster: plexrl.Cluster, router: FakeRouter
) -> None:
    cluster.create_job("j").cancel("enough")
    assert router.bodies["/v1/jobs/j/finish"] == {"outcome": "cancelled", "reason": "enough"}


@pytest.mark.parametrize(
    ("place", "resume", "cancel"),
    [
        (
            ClusterLocation("http://h:1"),
            "plexrl.connect('http://h:1').attach_job('j')",
            "plexrl cancel j --url http://h:1",
        ),
        (
            ClusterLocation("http://h:1", Path("/a b")),
            "plexrl.connect(data_dir='/a b').attach_job('j')",
            "plexrl cancel j --data-dir '/a b'",
        ),
        (
            ClusterLocation("http://h:1", Path("/d"), is_embedded=True),
            "plexrl.connect(data_dir='/d').attach_job('j')",
            "plexrl.connect(data_dir='/d').attach_job('j').cancel()",
        ),
    ],
)
def test_the_lines_to_resume_and_cancel_a_job_contain_its_cluster(
    place: ClusterLocation, resume: str, cancel: str
) -> None:
    assert (place.attach_line("j"), place.cancel_line("j")) == (resume, cancel)


@pytest.mark.parametrize(
    ("code", "outcome"), [(None, "completed"), (0, "completed"), (1, "failed")]
)
def test_a_zero_exit_inside_the_block_completes_the_job(
    cluster: plexrl.Cluster, router: FakeRouter, code: int | None, outcome: str
) -> None:
    with pytest.raises(SystemExit), cluster.create_job("j"):
        sys.exit(code)
    assert router.bodies["/v1/jobs/j/finish"]["outcome"] == outcome


def test_a_zero_exit_of_an_async_script_completes_the_job(router: FakeRouter) -> None:
    async def control() -> None:
        async with await plexrl.connect_async(router.url, "key", timeout_s=5.0) as cluster:
            with pytest.raises(SystemExit):
                async with await cluster.create_job("j"):
                    sys.exit()

    asyncio.run(control())
    assert router.bodies["/v1/jobs/j/finish"]["outcome"] == "completed"


def test_no_shown_line_contains_the_password_of_a_url() -> None:
    transport = Transport("http://me:secret@127.0.0.1:1", "key", 0.0)
    assert "secret" not in transport.location.attach_line("j")
    with pytest.raises(ConnectionLostError) as lost:
        transport.ask("GET", "/v1/jobs")
    assert "secret" not in lost.value.message
    transport.close()
