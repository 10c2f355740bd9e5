"""Typical first mistakes get a typed error before anything is sent."""

import asyncio
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest

import plexrl
from plexrl import errors, losses
from plexrl.client.calls.requests import create_deployment, create_job
from plexrl.client.calls.transport import AsyncTransport, Transport
from plexrl.client.data.metric_rows import metrics_row, read_rows
from tests.client.fake_router import JOB

VOCABULARY = "0123456789+="
MODEL = plexrl.tiny_qwen2(VOCABULARY)
TOKENIZER = plexrl.Tokenizer.from_vocabulary(VOCABULARY)
PROMPTS = [[3, 4, 5]]
UNCHECKED: Any = plexrl.Batch
"""For calls that a type checker would refuse."""
NAN, INF = float("nan"), float("inf")


def batch(mask: float = 1.0, **more: Any) -> plexrl.Batch:
    rows = {name: [[1.0] * 3, [1.0] * 2] for name in ("logprobs", "advantages")}
    return plexrl.Batch([[3, 4, 5], [6, 7]], {"mask": [[mask] * 3, [mask] * 2], **rows, **more})


class NothingIsSent(Transport):
    """A transport that fails the test on any request."""

    def request(self, call: Any) -> Any:
        pytest.fail(f"{call.method} {call.path} was sent")


@pytest.fixture
def job() -> Iterator[plexrl.Job]:
    transport = NothingIsSent("http://127.0.0.1:1", "key", 1.0)
    yield plexrl.Job(transport, JOB, heartbeat=False)
    transport.close()


@pytest.fixture
def actor(job: plexrl.Job) -> plexrl.TrainDeployment:
    return plexrl.TrainDeployment(job._transport, "j/actor")


@pytest.fixture
def rollout(job: plexrl.Job) -> plexrl.RolloutDeployment:
    return plexrl.RolloutDeployment(job._transport, "j/rollout")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (losses.ppo, r"the function ppo itself: write plexrl.losses.ppo\(\)"),
        ("grpo", r"loss is 'grpo': write plexrl.losses.grpo\(\)"),
        (None, "loss is None: write one of plexrl.losses"),
        (len, "one of plexrl.losses"),
        (plexrl.LossSpec(name="dpo"), "there is no loss 'dpo'"),  # type: ignore[arg-type]
        (losses.ppo(clip_low=NAN), "loss.clip_low is nan; it must be a number"),
        (losses.ppo(clip_high=-1.0), "loss.clip_high is -1.0; it must be .* at least 0"),
        (
            losses.decoupled_ppo(weight_cap=-1.0),
            "loss.weight_cap is -1.0; it must be .* at least 1e-06",
        ),
        (losses.decoupled_ppo(token_range=(2.0, 1.0)), r"loss.token_range is .*\(low, high\)"),
        (losses.decoupled_ppo(sequence_range=(0.5, float("nan"))), "loss.sequence_range is"),
        (losses.grpo(kl_coef="much"), "loss.kl_coef is 'much'"),  # type: ignore[arg-type]
        (losses.ppo(reduction="mean"), "loss.reduction is 'mean': use token_mean"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_loss_is_refused_with_a_hint(
    actor: plexrl.TrainDeployment, loss: Any, message: str
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        actor.forward_backward(batch(), loss)


@pytest.mark.parametrize("wrong", [[[3, 4]], {"tokens": [[3, 4]]}, None, np.ones((2, 2))])
def test_every_operation_on_a_batch_refuses_other_values(
    job: plexrl.Job, actor: plexrl.TrainDeployment, wrong: Any
) -> None:
    reference = plexrl.ReferenceDeployment(job._transport, "j/reference")
    reward = plexrl.RewardDeployment(job._transport, "j/reward")
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda rows: actor.forward_backward(rows, losses.ppo()),
        actor.forward,
        reference.forward,
        reward.score,
    )
    for call in calls:
        with pytest.raises(errors.BatchShapeError, match=r"give a plexrl.Batch"):
            call(wrong)


def test_weights_come_from_a_deployment_not_from_its_name(
    job: plexrl.Job, rollout: plexrl.RolloutDeployment
) -> None:
    reference = plexrl.ReferenceDeployment(job._transport, "j/reference")
    for wrong in ("actor", "j/actor", None, job):
        for deployment in (rollout, reference):
            with pytest.raises(
                errors.InvalidRequestError, match="give the train deployment itself"
            ):
                deployment.sync_weights(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [NAN, INF, -1.0, "fast", None, True])
@pytest.mark.parametrize(
    "name", ["learning_rate", "beta1", "eps", "weight_decay", "grad_clip_norm"]
)
def test_a_step_with_an_invalid_number_is_refused_by_name(
    actor: plexrl.TrainDeployment, name: str, value: Any
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=f"{name} is .*must be") as refused:
        actor.optim_step(**{"learning_rate": 1e-3, name: value})
    assert refused.value.details == {"parameter": name}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("12+3=", "'12[+]3=' is not a list of rows"),
        (["12+3="], "row 0 is '12[+]3=', not a list of token ids"),
        ([3, 4], "row 0 is 3, not a list of token ids"),
        ([[3.5]], "not a list of token ids"),
        (None, "None is not a list of rows"),
        (5, "5 is not a list of rows"),
    ],
)
def test_prompts_that_are_not_token_ids_are_refused(
    rollout: plexrl.RolloutDeployment, prompts: Any, message: str
) -> None:
    with pytest.raises(errors.BatchShapeError, match=message):
        rollout.generate(prompts)


@pytest.mark.parametrize("n", [0, -1, 1.5, "a", None, True, 10**6])
def test_an_invalid_number_of_samples_is_refused(rollout: plexrl.RolloutDeployment, n: Any) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"samples_per_prompt \(n\) is"):
        rollout.generate(PROMPTS, n=n)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (NAN, INF, -1, "hot", None)],
        *[("max_tokens", value) for value in (0, 1.5, None)],
        *[("top_p", value) for value in (NAN, 1.1, -0.1)],
        *[("top_k", value) for value in (-1, 1.5)],
        *[("seed", value) for value in (-1, 1.5, 2**64)],
        *[("stop_token_ids", value) for value in (2, "2", ["2"], [1.5])],
        *[("stop_sequences", value) for value in ("ab", ["ab"], [3, 4], None)],
        *[("stop_strings", value) for value in ("ab", [""], [3], None)],
    ],
)
def test_an_invalid_sampling_parameter_is_refused_by_name(
    rollout: plexrl.RolloutDeployment, name: str, value: Any
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=f"{name} is") as refused:
        rollout.generate(PROMPTS, sampling=plexrl.SamplingParams(**{name: value}))
    assert refused.value.details == {"parameter": name}
    with pytest.raises(errors.InvalidRequestError, match=r"give a plexrl\.SamplingParams"):
        rollout.generate(PROMPTS, sampling={name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNCHECKED.from_samples(PROMPTS, [[1]], 1.0), "1.0 is not a list of rows"),
        (lambda: UNCHECKED.from_samples(PROMPTS, [[1]], [1.0]), "one number for each prompt"),
        (lambda: UNCHECKED.from_samples(PROMPTS, [[1]], [[1.0]]), "1 of prompt 0 is not a Sample"),
        (lambda: UNCHECKED.from_samples(PROMPTS, [[1]], [[1.0, 2]]), "2 advantages of prompt 0"),
        (lambda: UNCHECKED.from_completions(PROMPTS, ["12"]), "row 0 is '12'"),
        (lambda: UNCHECKED.from_completions(PROMPTS, None), "completions: None is not a list"),
        (lambda: UNCHECKED.from_completions(PROMPTS, [[3]], advantages=[1.0]), r"shape \[\]"),
        (lambda: UNCHECKED.from_completions(PROMPTS, [[3]], advantages=1.0), "not a list of rows"),
        (lambda: UNCHECKED(None), "tokens: None is not a list of rows"),
        (lambda: UNCHECKED([[3]], [[1]]), "give a dict of rows by name"),
        (lambda: UNCHECKED([[3]], {"mask": ["a"]}), "mask: row 0 is 'a', not a list of numbers"),
        (lambda: UNCHECKED([[3]], {"mask": [1]}), r"mask: row 0 has the shape \[\]"),
        (lambda: UNCHECKED([[3, 4]], {"mask": [[[1, 1]]]}), r"the shape \[1, 2\]"),
        (lambda: UNCHECKED([[3, 4]], {"mask": [[1, [2]]]}), "not a list of numbers"),
        (lambda: UNCHECKED([[3, 4]], {"mask": [[1]]}), "row 0 has 1 values for 2 tokens"),
        (lambda: UNCHECKED([[3]]).with_values("weights", None), "None is not a list of rows"),
        (lambda: UNCHECKED([[3]]).with_values(3, [[1] * 3, [1] * 2]), "are named 3: give a string"),
    ],
)
def test_rows_of_a_wrong_type_or_shape_are_refused_by_name(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(errors.BatchShapeError, match=message):
        make()


def test_a_result_instead_of_rows_is_refused_with_a_hint(job: plexrl.Job) -> None:
    with pytest.raises(errors.BatchShapeError, match=r"not a list of rows: give its \.samples$"):
        UNCHECKED.from_samples(PROMPTS, plexrl.GenerateResult([], 0), [[1.0]])
    with pytest.raises(errors.BatchShapeError, match=r"not a list of rows: give its \.logprobs$"):
        UNCHECKED([[3]]).with_values("ref_logprobs", plexrl.ForwardResult([]))
    view: Any = {"operation": "o", "state": "pending"}
    pending: Any = plexrl.Future(job._transport, view, lambda *_: None)
    with pytest.raises(errors.BatchShapeError, match="not a list of rows: wait for its result"):
        UNCHECKED([[3]]).with_values("ref_logprobs", pending)


def test_a_batch_with_an_all_zero_mask_is_refused_before_sending(
    actor: plexrl.TrainDeployment,
) -> None:
    with pytest.raises(errors.NoTokenCountsError, match="leave this batch out"):
        actor.forward_backward(batch(mask=0.0), losses.grpo())
    with pytest.raises(errors.InvalidRequestError, match="mask is -1 in row 0"):
        actor.forward_backward(batch(mask=-1.0), losses.grpo())
    hollow = plexrl.Batch.from_completions([[1], []], [[2], []])
    with pytest.raises(errors.BatchShapeError, match="row 1 has 0 tokens"):
        actor.forward_backward(hollow, losses.cross_entropy())


@pytest.mark.parametrize(
    ("text", "position", "character"), [("1 + 2=", 1, " "), ("12=é", 3, "é"), ("12\n", 2, r"\\n")]
)
def test_a_character_outside_the_vocabulary_is_refused_with_its_position(
    text: str, position: int, character: str
) -> None:
    message = f"'{character}' at position {position}"
    with pytest.raises(errors.TokenRangeError, match=message) as refused:
        TOKENIZER.encode(text)
    assert refused.value.details["position"] == position
    assert TOKENIZER.encode(text, allow_unknown=True)[position] == plexrl.PAD


def test_a_text_has_control_tokens_only_if_that_is_asked_for() -> None:
    assert TOKENIZER.encode("<pad>1<eos>", control_tokens=True) == [plexrl.PAD, 4, plexrl.EOS]
    with pytest.raises(errors.TokenRangeError, match="'<' at position 0"):
        TOKENIZER.encode("<pad>1<eos>")


def test_the_tokenizer_refuses_values_of_a_wrong_type() -> None:
    for text in (12, None, ["1"]):
        with pytest.raises(errors.InvalidRequestError, match="give a str to encode"):
            TOKENIZER.encode(text)  # type: ignore[arg-type]
    for tokens in ("12", 5, [-1], [3.5], [2**40]):
        with pytest.raises(errors.InvalidRequestError):
            TOKENIZER.decode(tokens)  # type: ignore[arg-type]
    assert TOKENIZER.decode(np.array([3, 4])) == "01"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"vocabulary": "aab"},
        {"vocabulary": 12},
        {"vocabulary": "ab", "hidden": 0},
        {"vocabulary": "ab", "hidden": 7},
        {"vocabulary": "ab", "hidden": "big"},
        {"vocabulary": "ab", "layers": 0},
    ],
)
def test_an_invalid_tiny_model_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequestError):
        plexrl.tiny_qwen2(**arguments)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "a\nb", "-a", None, 5, "x" * 101])
def test_an_invalid_name_is_refused(name: Any) -> None:
    with pytest.raises(errors.InvalidRequestError, match="use up to 100 letters"):
        create_job(name, None, {})
    with pytest.raises(errors.InvalidRequestError, match="deployment name"):
        create_deployment("j", name, "train", MODEL, {})


def test_an_invalid_id_is_refused() -> None:
    for wrong in ("", "a b", 5):
        with pytest.raises(errors.InvalidRequestError, match="job id"):
            create_job("fine", wrong, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"parallelism": {"dp": 2}}, errors.LayoutError),
        ({"parallelism": "dp=2"}, errors.LayoutError),
        ({"lora": {"rank": 4}}, errors.InvalidRequestError),
        ({"trace": "philly"}, errors.InvalidRequestError),
        ({"workers": object()}, errors.InvalidRequestError),
    ],
)
def test_options_of_a_wrong_type_are_refused(
    job: plexrl.Job, options: dict[str, Any], kind: type[errors.PlexRLError]
) -> None:
    with pytest.raises(kind):
        job.train_deployment("actor", MODEL, **options)


def test_a_name_instead_of_a_model_is_refused(job: plexrl.Job) -> None:
    for deploy in (job.train_deployment, job.rollout_deployment, job.reward_deployment):
        for wrong in ("gpt2", None):
            with pytest.raises(errors.InvalidRequestError, match=r"give a plexrl\.ModelSpec"):
                deploy("actor", wrong)  # type: ignore[arg-type]


def test_numpy_numbers_are_accepted() -> None:
    call = create_job("a", None, {"priority": np.int64(3), "expected_s": np.float32(1.5)})
    assert (call.json["priority"], call.json["expected_s"]) == (3, 1.5)


def test_non_finite_metrics_survive_a_round_trip() -> None:
    row = metrics_row(np.int64(3), {"loss": NAN, "up": INF, "down": -INF, "r": np.float32(0.5)})
    assert row["values"] == {"loss": "NaN", "up": "Infinity", "down": "-Infinity", "r": 0.5}
    sent: Any = row["values"]
    [back] = read_rows([{"index": 1, "time": 0.0, "step": row["step"], "values": sent}])
    assert np.isnan(back["values"].pop("loss"))
    assert back["values"] == {"up": INF, "down": -INF, "r": 0.5}
    assert back["step"] == 3


@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (0.5, {"a": 1.0}, "step is 0.5"),
        ("x", {"a": 1.0}, "step is 'x'"),
        (0, [1.0], "give a dict of numbers by name"),
        (0, {1: 1.0}, "a metric's name is 1"),
        (0, {"a": "high"}, "metric 'a' is 'high'"),
        (0, {"a": None}, "metric 'a' is None"),
        (0, {"a": np.ones(3)}, r"metric 'a' is a ndarray .*\.mean\(\)"),
    ],
)
def test_metrics_that_are_not_numbers_are_refused_by_name(
    step: Any, values: Any, message: str
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        metrics_row(step, values)


def test_an_operation_of_another_kind_of_deployment_is_refused_with_a_hint(
    rollout: plexrl.RolloutDeployment, actor: plexrl.TrainDeployment
) -> None:
    transport = AsyncTransport("http://127.0.0.1:1", "key", 1.0)
    wrong: list[tuple[Any, str, str]] = [
        (rollout, "forward_backward", "a rollout deployment has no .*; a train deployment has it"),
        (actor, "score", "a train deployment has no score; a reward deployment has it"),
        (rollout, "forward", "a train deployment and a reference deployment have it"),
        (plexrl.AsyncTrainDeployment(transport, actor), "generate", "a rollout deployment has it"),
        (actor, "optim_steps", "a train deployment has no optim_steps$"),
    ]
    for deployment, name, said in wrong:
        with pytest.raises(AttributeError, match=said) as refused:
            getattr(deployment, name)
        assert (refused.value.name, refused.value.obj) == (name, deployment)
        assert not hasattr(copy(deployment), name)
    asyncio.run(transport.close())
