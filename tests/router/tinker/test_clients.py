"""What clients of the Tinker API may do, and what they are told."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.model.text.tokenizer import EOS
from tests.cluster.tools import wait_until
from tests.router.tinker.clients import LIMIT_S, ROWS, Tenant, datum, prompt, supervised

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def client(tenant: Tenant) -> Iterator[tinker.ServiceClient]:
    with tenant.service() as made:
        yield made


@pytest.fixture(scope="module")
def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    made = client.create_lora_training_client(base_model="tiny", rank=4, seed=1, train_mlp=False)
    return made.result(LIMIT_S)


@pytest.fixture(scope="module")
def sampler(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model="tiny").result()


def drawn(sampler: tinker.SamplingClient, count: int = 1, **settings: Any) -> list[list[int]]:
    params = types.SamplingParams(**{"max_tokens": 12, "seed": 5, "stop": [], **settings})
    found = sampler.sample(prompt(ROWS[0]), count, params).result(LIMIT_S)
    return [list(each.tokens) for each in found.sequences]


def test_samples_follow_seeds_counts_and_stops(sampler: tinker.SamplingClient) -> None:
    rows = drawn(sampler, 3)
    assert [len(row) for row in rows] == [12, 12, 12]
    assert len({tuple(row) for row in rows}) == 3
    assert drawn(sampler, 3) == rows
    assert drawn(sampler, 1, seed=6) != rows[:1]
    third = rows[0][2]
    [stopped] = drawn(sampler, stop=[third])
    assert stopped == rows[0][: rows[0].index(third) + 1]
    letter = "0123456789sr="[third - 3] if third > EOS else None
    if letter is not None:
        [by_text] = drawn(sampler, stop=letter)
        assert by_text == stopped


def test_prompts_are_scored_whole_or_at_their_end(sampler: tinker.SamplingClient) -> None:
    whole = sampler.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S)
    last = sampler.compute_logprobs(prompt(ROWS[0]), prompt_logprobs_last_n=2).result(LIMIT_S)
    assert last[:-2] == [None] * (len(whole) - 2)
    assert last[-2:] == whole[-2:]
    params = types.SamplingParams(max_tokens=2)
    found = sampler.sample(
        prompt(ROWS[0]), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=16
    ).result(LIMIT_S)
    assert found.topk_prompt_logprobs is not None
    for token, score, likeliest in zip(
        ROWS[0][1:], whole[1:], found.topk_prompt_logprobs[1:], strict=True
    ):
        assert likeliest is not None
        assert dict(likeliest)[token] == pytest.approx(score, abs=1e-5)


def test_samplers_of_two_clients_share_the_deployment_of_a_base_model(
    tenant: Tenant, sampler: tinker.SamplingClient
) -> None:
    with tenant.service() as other, tenant.http("/v1") as http:
        own = other.create_sampling_client(base_model="tiny").result()
        assert drawn(own) == drawn(sampler)
        jobs = [each for each in http.get("/jobs").json()["jobs"] if "base" in each["job"]]
        live = [each for each in jobs if each["ended_at"] is None]
        assert len(live) == 1
    # It outlives the client that ended, for the one that is left.
    assert drawn(sampler) == drawn(sampler)


def test_a_sampler_keeps_its_weights_while_training_goes_on(
    client: tinker.ServiceClient, trainer: tinker.TrainingClient
) -> None:
    data = supervised()
    first = trainer.save_weights_and_get_sampling_client().result(LIMIT_S)
    before = first.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S)
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.05)).result(LIMIT_S)
    second = trainer.save_weights_and_get_sampling_client(kind="inflight").result(LIMIT_S)
    after = second.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S)
    assert after != before
    assert first.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S) == before
    assert second.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S) == after

    kept = trainer.save_weights_for_sampler("kept", ttl_seconds=3600).result(LIMIT_S)
    third = client.create_sampling_client(model_path=kept.path).result(LIMIT_S)
    assert third.get_base_model() == "tiny"
    assert third.compute_logprobs(prompt(ROWS[0])).result(LIMIT_S) == after


def test_parts_of_a_batch_are_added_up_in_order(trainer: tinker.TrainingClient) -> None:
    """The SDK divides more than 1024 rows, and sends the first part last."""
    count = 520
    pair = supervised([[3, 4, 5], [9, 10, 11]])
    one = trainer.forward_backward(pair, "cross_entropy").result(LIMIT_S)
    norm = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(LIMIT_S).metrics
    parts = trainer.forward_backward(pair * count, "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=0.0))
    found = parts.result(LIMIT_S)
    assert found.metrics["loss:sum"] == pytest.approx(count * one.metrics["loss:sum"], rel=1e-4)
    assert len(found.loss_fn_outputs) == 2 * count
    for at, output in enumerate(found.loss_fn_outputs):
        wanted = one.loss_fn_outputs[at % 2]["logprobs"].to_numpy()
        assert np.allclose(output["logprobs"].to_numpy(), wanted, atol=1e-5)
    assert norm is not None
    stepped = step.result(LIMIT_S).metrics
    assert stepped is not None
    assert stepped["grad_norm:mean"] == pytest.approx(count * norm["grad_norm:mean"], rel=1e-4)


def test_a_custom_loss_of_the_client_has_its_own_gradient(trainer: tinker.TrainingClient) -> None:
    data = supervised()

    def halved(_: Any, rows: list[Any]) -> tuple[Any, dict[str, float]]:
        return -0.5 * sum(row.sum() for row in rows), {"rows": float(len(rows))}

    whole = trainer.forward_backward(data, "cross_entropy")
    full = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(LIMIT_S).metrics
    custom = trainer.forward_backward_custom(data, halved).result(LIMIT_S)
    half = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(LIMIT_S).metrics
    assert custom.metrics["rows"] == 3.0
    assert custom.metrics["loss:sum"] == pytest.approx(
        0.5 * whole.result(LIMIT_S).metrics["loss:sum"], rel=1e-5
    )
    assert full is not None
    assert half is not None
    assert half["grad_norm:mean"] == pytest.approx(0.5 * full["grad_norm:mean"], rel=1e-4)


def test_a_refused_request_uses_its_number_and_training_goes_on(
    trainer: tinker.TrainingClient,
) -> None:
    row = datum(ROWS[0], logprobs=[-1.0] * 5, advantages=[1.0] * 5)
    with pytest.raises(tinker.RequestFailedError, match='loss_fn="importance_sampling"'):
        trainer.forward_backward([row], "stable_reinforce").result(LIMIT_S)
    # In two parts, of which the SDK sends the first one last.
    with pytest.raises(tinker.RequestFailedError, match='loss_fn="importance_sampling"'):
        trainer.forward_backward([row] * 1025, "stable_reinforce").result(LIMIT_S)
    with pytest.raises(tinker.UnprocessableEntityError, match="greater than or equal to 3600"):
        trainer.save_state("short", ttl_seconds=5).result(LIMIT_S)
    with pytest.raises(tinker.RequestFailedError, match="takes clip_low_threshold"):
        trainer.forward_backward([row], "ppo", {"clip": 0.2}).result(LIMIT_S)
    wrong = datum(ROWS[0], weights=[1.0] * 5)
    wrong.loss_fn_inputs["target_tokens"] = types.TensorData(
        data=[9, 9, 9, 9, 9], dtype="int64", shape=[5]
    )
    with pytest.raises(tinker.RequestFailedError, match="shifted by one token"):
        trainer.forward_backward([wrong], "cross_entropy").result(LIMIT_S)
    with pytest.raises(tinker.RequestFailedError, match="no gradients"):
        trainer.optim_step(types.AdamParams(learning_rate=0.1)).result(LIMIT_S)
    outside = datum([3, 4, 99], weights=[1.0, 1.0])
    with pytest.raises(tinker.RequestFailedError, match="vocabulary"):
        trainer.forward_backward([outside], "cross_entropy").result(LIMIT_S)
    found = trainer.forward_backward([row], "importance_sampling").result(LIMIT_S)
    assert len(found.loss_fn_outputs) == 1
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(LIMIT_S)


def test_saved_weights_are_listed_described_and_deleted(
    tenant: Tenant, trainer: tinker.TrainingClient
) -> None:
    path = trainer.save_state("listed", ttl_seconds=7200, user_metadata={"a": "b"}).result(LIMIT_S)
    rest = tinker.RestClient(base_url=tenant.url, api_key=tenant.key)
    found = rest.list_checkpoints(trainer.model_id).result(LIMIT_S).checkpoints
    [one] = [each for each in found if each.checkpoint_id == "weights/listed"]
    assert one.tinker_path == path.path
    assert one.expires_at is not None
    assert one.user_metadata == {"a": "b"}
    info = rest.get_weights_info_by_tinker_path(path.path).result(LIMIT_S)
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("tiny", 4, False)
    run = rest.get_training_run_by_tinker_path(path.path).result(LIMIT_S)
    assert run.training_run_id == trainer.model_id
    rest.delete_checkpoint_from_tinker_path(path.path).result(LIMIT_S)
    found = rest.list_checkpoints(trainer.model_id).result(LIMIT_S).checkpoints
    assert "weights/listed" not in [each.checkpoint_id for each in found]
    with tenant.http() as http:
        assert http.get("/training_runs", params={"limit": -1}).status_code == 422
        large = http.post("/weights_info", json={"tinker_path": "x" * (9 << 20)})
        assert large.status_code == 413
    names = [each.model_name for each in rest.get_server_capabilities().result().supported_models]
    assert names == ["tiny"]


def test_a_session_that_finished_holds_nothing_and_is_told_so(
    cluster: EmbeddedCluster, tenant: Tenant
) -> None:
    with tenant.service() as client, tenant.http("/v1") as plexrl:
        made = client.create_lora_training_client(base_model="tiny", rank=2).result(LIMIT_S)
        made.save_weights_and_get_sampling_client().result(LIMIT_S)
        made.save_state("stays").result(LIMIT_S)
        session = client.holder.get_session_id()
        save = {"model_id": made.model_id, "seq_id": 3, "path": "unpolled"}
        with tenant.http() as http:
            http.post("/save_weights", json=save).raise_for_status()

        def is_saved() -> bool:
            listed = plexrl.get(f"/jobs/{session}/checkpoints").json()["checkpoints"]
            states = {each["name"]: each["state"] for each in listed}
            return states.get("0.weights.unpolled") == "durable"

        wait_until(is_saved, "the weights were not written")
        # What the documentation says of a client that is silent.
        assert plexrl.get(f"/jobs/{session}").json()["controller_timeout_s"] == 60.0
    with tenant.http() as http, tenant.http("/v1") as plexrl:
        assert plexrl.get(f"/jobs/{session}").json()["state"] == "COMPLETED"
        left = {each.name for each in (cluster.data_dir / "checkpoints" / session).iterdir()}
        assert left == {"0.weights.stays", "0.weights.unpolled"}
        kept = {each["tinker_path"] for each in http.get("/checkpoints").json()["checkpoints"]}
        path = f"tinker://{session}:train:0/weights"
        assert {f"{path}/stays", f"{path}/unpolled"} <= kept
        assert http.post("/session_heartbeat", json={"session_id": session}).status_code == 410
        body = {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}
        assert http.post("/create_model", json=body).status_code == 410
        lost = http.post("/retrieve_future", json={"request_id": f"{session}:train:0:1"})
        assert lost.status_code == 410


def test_one_tenant_sees_nothing_of_another(
    cluster: EmbeddedCluster, trainer: tinker.TrainingClient
) -> None:
    headers = {"Authorization": f"Bearer {cluster.api_key}"}
    with httpx.Client(base_url=cluster.url, headers=headers) as operator:
        key = operator.post("/v1/tenants", json={"name": "other"}).json()["api_key"]
    with Tenant(url=cluster.url, key=f"tml-{key}").http() as http:
        assert http.post("/get_info", json={"model_id": trainer.model_id}).status_code == 404
        session = http.post("/create_session", json={"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        refused = http.post("/create_model", json=body)
        assert refused.status_code == 404
        assert "no base model 'tiny'" in refused.json()["error"]
        assert http.get("/training_runs").json()["training_runs"] == []
        http.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}})
    with Tenant(url=cluster.url, key="tml-wrong").http() as http:
        assert http.post("/create_session", json={}).status_code == 401


@pytest.mark.slow  # The answer to a poll comes after 30 s.
@pytest.mark.usefixtures("trainer")
def test_a_waiting_request_says_why(tenant: Tenant) -> None:
    with tenant.http() as http:
        session = http.post("/create_session", json={"tags": []}).json()["session_id"]
        options = '{"workers": 4, "exclusive": true}'
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 2},
            "user_metadata": {"plexrl_train": options},
        }
        made = http.post("/create_model", json=body).json()["request_id"]
        model = http.post("/retrieve_future", json={"request_id": made}).json()["model_id"]
        step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        request = http.post("/optim_step", json=step).json()["request_id"]
        assert http.post("/optim_step", json=step).json()["request_id"] == request
        told = http.post("/retrieve_future", json={"request_id": request}).json()
        assert told["type"] == "try_again"
        assert told["queue_state"] == "paused_capacity"
        assert "GPU" in told["queue_state_reason"]
        http.post(f"/sessions/{session}/finish", json={"reason": {"type": "interrupted"}})
