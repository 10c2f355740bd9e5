"""What a submission may say about the job that it is a fork of."""

import pytest

from plexrl.errors import InvalidRequestError, UnknownJobError
from tests.scheduler.fake_cluster import FakeCluster


@pytest.mark.parametrize(
    ("step", "settings"),
    [(-1, {}), (10**12, {}), (1, {"x": "y" * 1001}), (1, {"x" * 1001: 1.0})],
)
def test_a_fork_that_says_too_much_is_refused(step: int, settings: dict[str, float]) -> None:
    cluster = FakeCluster()
    cluster.job("a")
    with pytest.raises(InvalidRequestError, match="fork"):
        cluster.job("b", fork={"job": "a", "step": step, "settings": settings})


def test_a_fork_of_another_tenants_job_is_refused_as_one_of_none() -> None:
    cluster = FakeCluster()
    cluster.job("a")
    with pytest.raises(UnknownJobError):
        cluster.job("b", tenant="u", fork={"job": "a", "step": 1, "settings": {}})
