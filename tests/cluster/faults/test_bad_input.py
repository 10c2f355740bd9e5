"""Every bad request gets a typed error with a remedy, and the cluster continues."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import plexrl
from plexrl import errors
from plexrl.client.calls.requests import create_job
from plexrl.client.calls.transport import Transport
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketRole
from plexrl.wire.tensors import MEDIA_TYPE, encode_body
from tests.cluster.tools import VOCABULARY, some_batch, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY)


def test_an_unknown_deployment_is_refused_by_name(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    response = httpx.post(
        f"{embedded.url}/v1/jobs/{job.job}/deployments/nobody/operations/barrier",
        params={"operation": f"{job.job}:1"},
        headers={"Authorization": f"Bearer {embedded.api_key}"},
    )
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_deployment"
    assert "nobody" in response.json()["error"]["message"]


def test_rows_of_unequal_length_are_refused_before_sending() -> None:
    with pytest.raises(errors.BatchShapeError, match="row 1 has 2 values for 3 tokens"):
        plexrl.Batch([[3, 4], [5, 6, 7]], {"mask": [[1, 1], [1, 1]]})


def test_a_loss_without_its_inputs_is_refused(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    with pytest.raises(errors.BatchShapeError, match="advantages"):
        actor.forward_backward(plexrl.Batch([[3, 4]]), plexrl.losses.grpo())


def test_tokens_outside_the_vocabulary_are_reported_with_their_position(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    batch = plexrl.Batch([[3, 4], [5, 99, 6]], {"mask": [[0, 1], [0, 1, 1]]})
    with pytest.raises(errors.TokenRangeError, match="row 1 has token 99 at position 1"):
        actor.forward_backward(batch, plexrl.losses.cross_entropy())


def test_nan_values_are_reported_with_their_position(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    batch = plexrl.Batch([[3, 4], [5, 6]], {"weights": [[0, 1], [0, np.nan]]})
    with pytest.raises(errors.NonFiniteInputError, match="row 1 at position 1"):
        actor.forward_backward(batch, plexrl.losses.custom())


def test_a_non_finite_gradient_is_dropped_and_training_continues(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2)
    huge = plexrl.Batch([[3, 4, 5]], {"weights": [[0, 3e38, 3e38]]})
    with pytest.raises(errors.NonFiniteGradientError, match="dropped"):
        actor.forward_backward(huge, plexrl.losses.custom()).result()
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    assert actor.optim_step(learning_rate=1e-3).result().metrics["grad_norm"] < 1e3
    assert actor.status()["incarnation"] == 1


def test_a_step_without_gradients_is_refused_and_changes_nothing(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2)
    batch = some_batch(1)

    def logprobs() -> list[np.ndarray]:
        return actor.forward(batch).result().logprobs

    actor.forward_backward(batch, plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result()
    before = logprobs()
    # The moments of the earlier step would change the parameters.
    with pytest.raises(errors.NoGradientsError, match="nothing was changed"):
        actor.optim_step(learning_rate=1e-2, weight_decay=0.1).result()
    actor.forward_backward(batch, plexrl.losses.grpo())
    actor.zero_grad()
    with pytest.raises(errors.NoGradientsError, match="forward_backward before each"):
        actor.optim_step(learning_rate=1e-2).result()
    assert all(map(np.array_equal, before, logprobs()))
    actor.forward_backward(batch, plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result()
    assert not all(map(np.array_equal, before, logprobs()))
    assert actor.status()["incarnation"] == 1


def test_an_unread_step_without_gradients_is_raised_by_the_next_call(
    job: plexrl.Job,
) -> None:
    actor = job.train_deployment("actor", MODEL)
    actor.optim_step(learning_rate=1e-2)
    actor.barrier().result()
    with pytest.raises(errors.EarlierFailureError) as caught:
        actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    assert isinstance(caught.value.__cause__, errors.NoGradientsError)
    actor.recover()
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-2).result()


def test_all_zero_advantages_make_a_step_that_changes_nothing(
    job: plexrl.Job,
) -> None:
    actor = job.train_deployment("actor", MODEL)
    batch = some_batch(1).with_values("advantages", [[0.0] * n for n in some_batch(1).lengths])
    actor.forward_backward(batch, plexrl.losses.grpo())
    assert actor.optim_step(learning_rate=1e-2).result().metrics["grad_norm"] == 0.0


def test_ranks_with_masked_rows_step_with_the_others(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2)
    rows = [[3, 4, 5]] * 4
    mask = [[0.0, 1.0, 1.0], *[[0.0] * 3] * 3]
    actor.forward_backward(plexrl.Batch(rows, {"mask": mask}), plexrl.losses.cross_entropy())
    assert actor.optim_step(learning_rate=1e-2).result().metrics["grad_norm"] > 0.0


def test_non_finite_metrics_are_kept_and_the_job_continues(job: plexrl.Job) -> None:
    job.log(1, {"loss": float("nan"), "ratio": float("inf"), "reward": 0.5})
    job.log(2, {"loss": 1.0})
    first, second = job.metrics()
    assert np.isnan(first["values"].pop("loss"))
    assert first["values"] == {"ratio": float("inf"), "reward": 0.5}
    assert second["values"] == {"loss": 1.0}


def test_a_prompt_too_long_for_the_deployment_is_refused(job: plexrl.Job) -> None:
    rollout = job.rollout_deployment("rollout", MODEL, max_sequence_tokens=16)
    with pytest.raises(errors.BatchShapeError, match="max_sequence_tokens is 16"):
        rollout.generate([[3] * 16])


def test_a_model_too_large_for_a_gpu_is_refused_with_the_workers_it_needs(job: plexrl.Job) -> None:
    huge = plexrl.tiny_qwen2(VOCABULARY, hidden=4096, layers=4)
    with pytest.raises(errors.ModelDoesNotFitError, match="ask for at least"):
        job.train_deployment("huge", huge)


def test_more_workers_than_gpus_are_refused(job: plexrl.Job) -> None:
    with pytest.raises(errors.CapacityError, match="asks for 99 GPUs; the cluster has 8"):
        job.train_deployment("wide", MODEL, workers=99)


def test_an_unsupported_layout_is_refused_with_the_supporting_backends(
    job: plexrl.Job,
) -> None:
    with pytest.raises(errors.LayoutError, match="fsdp: dp, tp; megatron: dp, tp, pp") as refused:
        job.train_deployment("a", MODEL, parallelism=plexrl.Parallelism(dp=2, pp=2))
    assert refused.value.details == {"field": "pp", "backend": "fsdp"}
    with pytest.raises(errors.LayoutError, match="workers is 3, but dp=2 needs 2"):
        job.train_deployment("a", MODEL, workers=3, parallelism=plexrl.Parallelism(dp=2))


def test_results_of_a_layout_keep_the_order_of_the_rows(job: plexrl.Job) -> None:
    rows = [[3 + row] * (2 + row % 5) for row in range(7)]
    single = job.train_deployment("single", MODEL)
    actor = job.train_deployment("actor", MODEL, parallelism=plexrl.Parallelism(dp=2))
    assert actor.status()["workers"] == 2
    expected = single.forward(plexrl.Batch(rows)).result().logprobs
    found = actor.forward(plexrl.Batch(rows)).result().logprobs
    for row, other in zip(expected, found, strict=True):
        assert np.allclose(row, other, atol=1e-5)


def test_an_unknown_architecture_or_backend_is_refused(job: plexrl.Job) -> None:
    with pytest.raises(errors.UnsupportedModelError, match="'rnn', which"):
        job.train_deployment("a", plexrl.ModelSpec(architecture="rnn", config_json="{}"))
    with pytest.raises(errors.InvalidRequestError, match="no backend 'jax'"):
        job.train_deployment("b", MODEL, backend="jax")


def test_a_model_with_a_missing_path_is_refused(job: plexrl.Job, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in ("a\0b", str(tmp_path / "loop"), str(tmp_path)):
        with pytest.raises(errors.InvalidRequestError):
            job.train_deployment("a", plexrl.ModelSpec(path=path))


def test_an_id_used_twice_is_a_conflict(embedded: EmbeddedCluster, job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL)
    url = f"{embedded.url}/v1/jobs/{job.job}/deployments/actor/operations"
    with httpx.Client(headers={"Authorization": f"Bearer {embedded.api_key}"}) as client:
        query = {"operation": f"{job.job}:same"}
        first = client.post(f"{url}/barrier", params=query, json={})
        again = client.post(f"{url}/barrier", params=query, json={})
        other = client.post(f"{url}/optim_step", params=query, json={"learning_rate": 0.1})
    assert first.status_code == again.status_code == 202
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    actor.barrier().result()


def test_another_batch_under_the_same_id_is_a_conflict(
    embedded: EmbeddedCluster, job: plexrl.Job
) -> None:
    job.train_deployment("actor", MODEL)
    bodies = [encode_body({}, plexrl.Batch([row]).arrays()) for row in ([3, 4], [3, 4], [5, 6])]
    statuses = [
        httpx.post(
            f"{embedded.url}/v1/jobs/{job.job}/deployments/actor/operations/forward",
            params={"operation": f"{job.job}:batch"},
            content=body,
            headers={"Authorization": f"Bearer {embedded.api_key}", "Content-Type": MEDIA_TYPE},
        ).status_code
        for body in bodies
    ]
    assert statuses == [202, 202, 409]


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [
        ("dance", {}, "invalid_request"),
        ("optim_step", {"learning_rate": "fast"}, "invalid_request"),
        ("optim_step", {"learning_rate": 0.1, "momentum": 1}, "invalid_request"),
        ("optim_step", {"learning_rate": -1.0}, "invalid_request"),
        ("forward", {}, "batch_shape"),
        ("save_checkpoint", {"name": "../../etc"}, "invalid_request"),
        ("generate", {}, "invalid_request"),
    ],
)
def test_malformed_operations_have_stable_codes(
    embedded: EmbeddedCluster, job: plexrl.Job, kind: str, body: dict[str, object], code: str
) -> None:
    job.train_deployment("actor", MODEL)
    response = httpx.post(
        f"{embedded.url}/v1/jobs/{job.job}/deployments/actor/operations/{kind}",
        params={"operation": f"{job.job}:bad"},
        json=body,
        headers={"Authorization": f"Bearer {embedded.api_key}"},
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("kind", "content", "content_type", "names"),
    [
        ("forward", b"\xff" * 64, MEDIA_TYPE, "safetensors"),
        ("forward", b"\x10\xc3\0\0\0\0\0\0" + b'{"a":' + b"[" * 49_995, MEDIA_TYPE, "safetensors"),
        ("barrier", b"[" * 50_000, "application/json", "JSON object"),
        ("barrier", b'{"a":"\xff"}', "application/json", "JSON object"),
    ],
    ids=["garbage", "deep-safetensors", "deep-json", "bad-text"],
)
def test_a_body_of_another_format_is_refused(
    embedded: EmbeddedCluster,
    job: plexrl.Job,
    kind: str,
    content: bytes,
    content_type: str,
    names: str,
) -> None:
    job.train_deployment("actor", MODEL)
    response = httpx.post(
        f"{embedded.url}/v1/jobs/{job.job}/deployments/actor/operations/{kind}",
        params={"operation": f"{job.job}:garbage"},
        content=content,
        headers={"Authorization": f"Bearer {embedded.api_key}", "Content-Type": content_type},
    )
    assert response.status_code == 400
    assert names in response.json()["error"]["message"]


def test_a_key_that_is_missing_or_wrong_is_refused(embedded: EmbeddedCluster) -> None:
    assert httpx.get(f"{embedded.url}/v1/jobs").status_code == 401
    with (
        plexrl.connect(embedded.url, "plx-wrong") as stranger,
        pytest.raises(errors.AuthenticationError, match="unknown"),
    ):
        stranger.jobs()


def test_a_tenant_cannot_see_or_change_anothers_objects(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, job: plexrl.Job
) -> None:
    key = cluster.create_tenant(f"tenant-{job.job}")
    with plexrl.connect(embedded.url, key) as stranger:
        assert stranger.jobs() == []
        with pytest.raises(errors.UnknownJobError):
            stranger.attach_job(job.job)
        with pytest.raises(errors.PermissionDeniedError):
            stranger.create_tenant("more")


def test_only_its_tenant_loads_a_checkpoint_of_another_job(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, job: plexrl.Job
) -> None:
    path = job.train_deployment("actor", MODEL).save_checkpoint("mine").result()["path"]
    key = cluster.create_tenant(f"thief-{job.job}")
    with plexrl.connect(embedded.url, key) as stranger, stranger.create_job("theft") as theft:
        models = (
            theft.train_deployment("actor", MODEL),
            theft.rollout_deployment("rollout", MODEL),
            theft.reference_deployment("reference", MODEL),
        )
        for model in models:
            for name in (job.job, f"{theft.job}/../{job.job}", f"{job.job}/."):
                with pytest.raises(errors.UnknownJobError):
                    model.load_checkpoint("mine", job=name).result()
        for way in (path, f"{path}/.", f"{embedded.data_dir}/logs/../checkpoints/{job.job}/mine"):
            with pytest.raises(errors.NotFoundError, match="there is no model"):
                theft.reference_deployment("stolen", plexrl.ModelSpec(path=way))
    with cluster.create_job("heir") as heir:
        heir.train_deployment("actor", MODEL).load_checkpoint("mine", job=job.job).result()


def test_existing_and_missing_checkpoints_are_typed_errors(job: plexrl.Job) -> None:
    actor = job.train_deployment("actor", MODEL, workers=2)
    actor.save_checkpoint("one").result()
    with pytest.raises(errors.CheckpointExistsError, match="overwrite"):
        actor.save_checkpoint("one").result()
    with pytest.raises(errors.CheckpointNotFoundError, match="two"):
        actor.load_checkpoint("two").result()
    actor.save_checkpoint("one", overwrite=True).result()
    assert actor.status()["incarnation"] == 1


def test_an_ended_job_accepts_no_operations(cluster: plexrl.Cluster) -> None:
    with cluster.create_job("short") as job:
        actor = job.train_deployment("actor", MODEL)
    with pytest.raises(errors.JobEndedError, match="completed"):
        actor.barrier()


def test_a_second_writer_with_a_stale_token_is_refused(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, job: plexrl.Job
) -> None:
    actor = job.train_deployment("actor", MODEL)
    actor.barrier().result()
    group = next(g for g in cluster.groups() if g["group"] == actor.status()["group"])
    # Even with a valid ticket of the node.
    claims = Claims(role=TicketRole.WORKER, job=job.job, deployment=f"{job.job}/intruder")
    client = StateManagerClient(
        cluster.nodes()[0]["statemanager"],
        deployment=claims.deployment,
        rank=0,
        world_size=1,
        ticket=read_ticket_key(embedded.data_dir / "ticket.key").mint(claims),
    )
    arena = Arena(4096)
    try:
        with pytest.raises(errors.StaleTokenError, match="stale"):
            client.register(arena, (), group=group["group"], token=group["token"] - 1)
    finally:
        client.close()
        arena.close()
    actor.barrier().result()


@pytest.mark.slow
def test_requests_wait_for_a_full_journal_until_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = 400
    caplog.set_level(logging.INFO, logger="httpx")
    small = start_embedded(tmp_path / "data", virtual_gpus=1, journal_bytes_max=65_536)

    def fill_the_journal() -> None:
        transport = Transport(small.url, small.api_key, 60.0)
        for index in range(wanted):
            transport.request(create_job("j" * 90, f"job-{index}", {}))
        transport.close()

    with plexrl.connect(small.url, small.api_key) as cluster, ThreadPoolExecutor(1) as pool:
        filling = pool.submit(fill_the_journal)

        # Snapshots free space again and again, so the condition itself may end before the test
        # reads it, and a request may succeed before the SDK says that it waits.
        wait_until(lambda: "507 Insufficient" in caplog.text, "the journal never became full")
        assert len(cluster.jobs()) > 10
        small.close()
        roomy = start_embedded(tmp_path / "data", virtual_gpus=1)
        try:
            assert roomy.url == small.url
            filling.result(120)
            assert cluster.status()["jobs_total"] == wanted
        finally:
            roomy.close()
