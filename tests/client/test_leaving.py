"""How a controller leaves a job that has not ended."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import plexrl
from plexrl.client.place import Place
from tests.client.test_sdk import FakeRouter


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    server = FakeRouter()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cluster(router: FakeRouter) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(router.url, "key", timeout_s=5.0) as connected:
        yield connected


def test_a_controller_that_detaches_tells_the_cluster(
    cluster: plexrl.Cluster, router: FakeRouter
) -> None:
    with cluster.create_job("j") as job:
        job.detach()
    assert router.bodies["/v1/jobs/j/finish"]["outcome"] == "detached"


def test_an_error_after_that_does_not_end_the_job(
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


def test_who_only_looks_at_a_job_detaches_nothing(
    cluster: plexrl.Cluster, router: FakeRouter
) -> None:
    cluster.attach_job("j", heartbeat=False).detach()
    assert "/v1/jobs/j/finish" not in router.bodies


def test_a_cluster_that_does_not_answer_keeps_nobody_from_leaving(
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
            Place("http://h:1"),
            "plexrl.connect('http://h:1').attach_job('j')",
            "plexrl cancel j --url http://h:1",
        ),
        (
            Place("http://h:1", Path("/a b")),
            "plexrl.connect(data_dir='/a b').attach_job('j')",
            "plexrl cancel j --data-dir '/a b'",
        ),
        (
            Place("http://h:1", Path("/d"), is_embedded=True),
            "plexrl.connect(data_dir='/d').attach_job('j')",
            "plexrl.connect(data_dir='/d').attach_job('j').cancel()",
        ),
    ],
)
def test_the_lines_that_resume_and_cancel_a_job_name_its_cluster(
    place: Place, resume: str, cancel: str
) -> None:
    assert (place.attach("j"), place.cancel("j")) == (resume, cancel)
