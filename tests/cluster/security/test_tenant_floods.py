"""A tenant that exceeds its bounds is refused; other tenants are not."""

from collections.abc import Iterator

import httpx
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.errors import CheckpointNotFoundError, PayloadTooLargeError, QuotaExceededError
from plexrl.wire.messages.cluster_views import DescribedTenantView
from tests.cluster.tools import VOCABULARY

# The tests of the tenants' accounting and of the log of metrics have the bounds themselves.
pytestmark = pytest.mark.slow

JSON_BYTES_MAX = 1 << 20


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    running = start_embedded(
        tmp_path_factory.mktemp("bounded"),
        virtual_gpus=1,
        tenant_live_jobs_max=3,
        tenant_checkpoints_max=1,
        metrics_row_bytes_max=1000,
        metrics_job_bytes_max=10_000,
        json_bytes_max=JSON_BYTES_MAX,
    )
    yield running
    running.close()


@pytest.fixture
def operator(bounded: EmbeddedCluster) -> Iterator[plexrl.Cluster]:
    with plexrl.connect(bounded.url, bounded.api_key) as cluster:
        yield cluster


def as_tenant(
    bounded: EmbeddedCluster, operator: plexrl.Cluster, name: str
) -> tuple[plexrl.Cluster, str]:
    key = operator.create_tenant(name)
    return plexrl.connect(bounded.url, key), key


def row_of(operator: plexrl.Cluster, name: str) -> DescribedTenantView:
    return next(each for each in operator.tenants() if each["tenant"] == name)


def test_jobs_beyond_the_bound_are_refused_until_some_have_ended(
    bounded: EmbeddedCluster, operator: plexrl.Cluster
) -> None:
    tenant, _ = as_tenant(bounded, operator, "many-jobs")
    with tenant:
        jobs = [tenant.create_job("j") for _ in range(3)]
        with pytest.raises(QuotaExceededError, match="3 jobs that have not ended"):
            tenant.create_job("j")
        row = row_of(operator, "many-jobs")
        assert (row["live_jobs"], row["live_jobs_bound"]) == (3, 3)
        jobs[0].finish()
        jobs.append(tenant.create_job("j"))
        operator.configure_tenant("many-jobs", live_jobs_max=4)
        jobs.append(tenant.create_job("j"))
        with pytest.raises(QuotaExceededError, match="4 are the most"):
            tenant.create_job("j")
        operator.configure_tenant("many-jobs", live_jobs_max=None)
        assert row_of(operator, "many-jobs")["live_jobs_bound"] == 3
        for job in jobs:
            job.finish()


def test_metrics_are_bounded_by_row_and_by_job(
    bounded: EmbeddedCluster, operator: plexrl.Cluster
) -> None:
    tenant, key = as_tenant(bounded, operator, "many-metrics")
    with tenant, tenant.create_job("j") as job:
        job.log(1, {"loss": 0.5})
        with pytest.raises(PayloadTooLargeError):
            job.log(2, {f"value{index}": 1.0 for index in range(100)})
        flood = httpx.post(
            f"{bounded.url}/v1/jobs/{job.job}/metrics",
            headers={"Authorization": f"Bearer {key}"},
            json={"step": 3, "values": {"x" * JSON_BYTES_MAX: 1.0}},
        )
        assert flood.status_code == 413
        with pytest.raises(QuotaExceededError, match="metrics_job_bytes_max"):
            log_much(job)
        found = job.metrics()
        assert found[0]["values"] == {"loss": 0.5}
        assert [row["index"] for row in found] == list(range(1, len(found) + 1))


def log_much(job: plexrl.Job) -> None:
    for step in range(1000):
        job.log(step, {"loss": 0.5})


def test_checkpoints_beyond_the_quota_are_refused_until_one_is_deleted(
    bounded: EmbeddedCluster, operator: plexrl.Cluster
) -> None:
    tenant, key = as_tenant(bounded, operator, "many-checkpoints")
    with tenant, tenant.create_job("j") as job:
        actor = job.train_deployment("actor", plexrl.tiny_qwen2(VOCABULARY))
        actor.save_checkpoint("one").result(120)
        with pytest.raises(QuotaExceededError, match="has 1 checkpoints"):
            actor.save_checkpoint("two").result(120)
        row = row_of(operator, "many-checkpoints")
        assert (row["checkpoints"], row["checkpoints_bound"]) == (1, 1)
        assert int(str(row["checkpoint_bytes"])) > 1000
        actor.save_checkpoint("one", overwrite=True).result(120)
        with pytest.raises(CheckpointNotFoundError):
            job.delete_checkpoint("two")
        job.delete_checkpoint("one")
        actor.save_checkpoint("two").result(120)
        operator.configure_tenant("many-checkpoints", checkpoints_max=10, checkpoint_bytes_max=1000)
        with pytest.raises(QuotaExceededError, match="and 1000 bytes"):
            actor.save_checkpoint("three").result(120)
        operator.configure_tenant("many-checkpoints", checkpoint_bytes_max=1 << 40)
        actor.save_checkpoint("three").result(120)
        assert sorted(each["name"] for each in job.checkpoints()) == ["three", "two"]

        other, _ = as_tenant(bounded, operator, "other")
        with other, pytest.raises(plexrl.PlexRLError, match="there is no job"):
            other.attach_job(job.job).delete_checkpoint("two")
        answer = httpx.post(
            f"{bounded.url}/v1/jobs/{job.job}/deployments/actor/operations/barrier",
            params={"operation": "o"},
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            content=b'{"x": "' + JSON_BYTES_MAX * b"x" + b'"}',
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "payload_too_large"
