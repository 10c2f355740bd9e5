"""The `openai` package against a cluster: completions and chats, keys of a job, captured calls."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.model.text.tokenizer import vocabulary_files
from plexrl.worker.models import build_model

VOCABULARY = "abcdefghijklmnopqrstuvwxyz 0123456789:.\n"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> plexrl.ModelSpec:
    """`MODEL` as a directory with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    made: Any = build_model(MODEL)
    made.save_pretrained(folder)
    files = {**vocabulary_files(VOCABULARY), "chat_template.jinja": TEMPLATE}
    files["generation_config.json"] = files.pop("config.json")
    for name, text in files.items():
        (folder / name).write_text(text)
    return plexrl.ModelSpec(path=str(folder))


@pytest.fixture
def rollout(job: plexrl.Job, model: plexrl.ModelSpec) -> plexrl.RolloutDeployment:
    return job.rollout_deployment("actor", model, max_sequence_tokens=512)


@pytest.fixture
def client(rollout: plexrl.RolloutDeployment) -> Iterator[openai.OpenAI]:
    with client_of(rollout.openai()) as made:
        yield made


def client_of(access: plexrl.OpenAIAccess) -> openai.OpenAI:
    return openai.OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


def chat(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "actor", "max_tokens": 12, "seed": 7, **options}
    return client.chat.completions.create(
        messages=messages, extra_body=settings.pop("extra", {}), **settings
    )


def test_a_completion_is_what_generate_draws(
    rollout: plexrl.RolloutDeployment, client: openai.OpenAI
) -> None:
    tokenizer = rollout.tokenizer()
    prompt = tokenizer.encode("abc", add_special_tokens=True)
    sampling = plexrl.SamplingParams(max_tokens=9, seed=3, top_logprobs=2)
    wanted = rollout.generate([prompt], n=2, sampling=sampling).result().samples[0]
    asked: dict[str, Any] = {"model": "actor", "max_tokens": 9, "seed": 3, "n": 2, "logprobs": 2}
    found = client.completions.create(prompt="abc", **asked)
    assert [each.text for each in found.choices] == [
        tokenizer.decode(sample.tokens) for sample in wanted
    ]
    for choice, sample in zip(found.choices, wanted, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [float(each) for each in sample.logprobs]
        assert choice.finish_reason == sample.finish_reason
    drawn = sum(len(sample.tokens) for sample in wanted)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), drawn)
    parts: dict[int, str] = {0: "", 1: ""}
    usages = []
    for part in client.completions.create(
        prompt="abc", stream=True, stream_options={"include_usage": True}, **asked
    ):
        usages.append(part.usage)
        for choice in part.choices:
            parts[choice.index] += choice.text
    assert [parts[0], parts[1]] == [each.text for each in found.choices]
    assert usages[-1] == found.usage
    assert [model.id for model in client.models.list()] == ["actor"]


def test_a_chat_uses_the_template_and_ends_at_a_stop_string(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "what is 1"}]
    whole = chat(client, messages, logprobs=True, top_logprobs=3)
    assert whole.usage.prompt_tokens == len("user: what is 1\nassistant: ")
    text = whole.choices[0].message.content
    assert text
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    stop = text[3:5]
    ended = chat(client, messages, stop=[stop]).choices[0]
    assert (ended.message.content, ended.finish_reason) == (text[: text.find(stop)], "stop")
    streamed = "".join(
        part.choices[0].delta.content or ""
        for part in chat(client, messages, stop=[stop], stream=True)
    )
    assert streamed == ended.message.content


def test_errors_are_of_openais_kinds(client: openai.OpenAI) -> None:
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError, match="the deployment's name is 'actor'") as unknown:
        chat(client, hello, model="gpt")
    assert unknown.value.param == "model"
    for options in (
        *({"presence_penalty": 0.5}, {"temperature": -1.0}, {"max_tokens": 0}),
        *({"n": 1000, "max_tokens": 400, "logprobs": True, "top_logprobs": 20},),
    ):
        with pytest.raises(openai.BadRequestError):
            chat(client, hello, **options)
    with pytest.raises(openai.BadRequestError, match="the model's own templates"):
        chat(client, hello, extra={"chat_template": TEMPLATE})
    wrong = openai.OpenAI(base_url=str(client.base_url), api_key="plx-none", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_jobs_key_opens_its_endpoints_only_and_ends_with_the_job(
    cluster: plexrl.Cluster, embedded: EmbeddedCluster
) -> None:
    with cluster.create_job("keys") as job, cluster.create_job("other") as other:
        rollout = job.rollout_deployment("actor", MODEL)
        access = rollout.openai()
        headers = {"Authorization": f"Bearer {access.api_key}"}
        with httpx.Client(base_url=embedded.url, headers=headers) as http:
            assert http.get(f"{access.base_url}/models").status_code == 200
            for path in (
                f"/v1/jobs/{job.job}",
                "/v1/jobs",
                "/v1/tenants",
                f"/v1/jobs/{job.job}/deployments/actor",
                f"/v1/jobs/{other.job}/deployments/actor/openai/v1/models",
            ):
                assert http.get(path).status_code == 403, path
            assert http.post(f"/v1/jobs/{job.job}/keys").status_code == 403
            keys = f"{embedded.url}/v1/jobs/{job.job}/keys"
            tenant = {"Authorization": f"Bearer {embedded.api_key}"}
            assert httpx.delete(keys, headers=tenant).json() == {"job": job.job}
            assert http.get(f"{access.base_url}/models").status_code == 401
            access = rollout.openai()
            http.headers["Authorization"] = f"Bearer {access.api_key}"
            assert http.get(f"{access.base_url}/models").status_code == 200
            job.finish("completed")
            assert http.get(f"{access.base_url}/models").status_code == 401
        with pytest.raises(plexrl.errors.JobEndedError):
            rollout.openai()


def test_captured_turns_are_one_segment_of_exact_tokens(
    job: plexrl.Job, rollout: plexrl.RolloutDeployment, model: plexrl.ModelSpec
) -> None:
    tokenizer = rollout.tokenizer()
    access = rollout.openai("first")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "count"}]
    replies = []
    with client_of(access) as client:
        for turn in range(3):
            extra = {"return_token_ids": True}
            reply = chat(client, messages, seed=turn, extra=extra, stream=False, logprobs=True)
            replies.append(reply)
            message = reply.choices[0].message
            messages += [message, {"role": "tool", "content": f"result {turn}"}]
    (segment,) = rollout.captured("first")
    # Each prompt is the former prompt, the tokens drawn after it, and only then new text.
    before: list[int] = []
    for reply in replies:
        prompt = reply.choices[0].prompt_token_ids
        assert prompt[: len(before)] == before
        before = [*prompt, *reply.choices[0].token_ids]
    assert segment.tokens == before
    drawn = [token for reply in replies for token in reply.choices[0].token_ids]
    kept = zip(segment.tokens, segment.mask, strict=True)
    assert [token for token, mask in kept if mask] == drawn
    logprobs = [entry.logprob for reply in replies for entry in reply.choices[0].logprobs.content]
    assert [each for each, mask in zip(segment.logprobs, segment.mask, strict=True) if mask] == (
        logprobs
    )
    assert [span.version for span in segment.weights] == [0, 0, 0]
    assert "result 0" in tokenizer.decode(segment.tokens)
    train = job.train_deployment("train", model)
    batch = plexrl.Batch.from_segments([segment], [1.0])
    result = train.forward_backward(batch, plexrl.losses.importance_sampling()).result()
    assert result.metrics["tokens"] == len(drawn)
    assert result.metrics["ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_history_that_was_rewritten_begins_another_segment(
    rollout: plexrl.RolloutDeployment,
) -> None:
    access = rollout.openai("rewritten")
    with client_of(access) as client:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        reply = chat(client, messages).choices[0].message
        chat(client, [*messages, reply, {"role": "user", "content": "two"}])
        chat(client, [{"role": "user", "content": "in short"}, reply])
    first, second = rollout.captured("rewritten")
    assert [len(first.operations), len(second.operations)] == [2, 1]
    with pytest.raises(plexrl.errors.NotFoundError):
        rollout.captured("never")
