"""How the kinds of deployment answer the prompts of a `plexrl.rewards.Judge`."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from plexrl.client.data.batch import Batch
from plexrl.client.data.results import Sample
from plexrl.errors import ConflictError, ExecutionError, InvalidRequestError, PlexRLError
from plexrl.limits import LIMITS, check_numbers
from plexrl.rewards.graders.judge import Ask
from plexrl.wire.parameter_checks import check_parameters

if TYPE_CHECKING:
    from plexrl.client.blocking.deployment_kinds import (
        ReferenceDeployment,
        RewardDeployment,
        RolloutDeployment,
    )
    from plexrl.client.futures.futures import Future
    from plexrl.wire.operations import SamplingParams

ResultT = TypeVar("ResultT")
Answers = Sequence[tuple[Sequence[int], float]]
"""Token ids of each answer that the judge may give, and its score."""


def ask_for_probabilities(
    deployment: "ReferenceDeployment", answers: Answers, micro_batch_tokens: int, timeout_s: float
) -> Ask:
    """The mean score of the answers, weighted by their probabilities.

    Raises:
        InvalidRequestError: there are fewer than two answers, one has no tokens, or two are alike.
    """
    _check(micro_batch_tokens, timeout_s)
    texts = [list(map(int, tokens)) for tokens, _ in answers]
    scores = [float(score) for _, score in answers]
    if len(texts) < 2 or not all(texts) or len(set(map(tuple, texts))) < len(texts):
        raise InvalidRequestError(
            "a judge needs at least two different answers, each with one token or more, such as "
            "[(tokenizer.encode(' yes'), 1.0), (tokenizer.encode(' no'), 0.0)]",
            parameter="answers",
        )

    def ask(prompts: list[list[int]]) -> list[float]:
        rows = [[*prompt, *text] for prompt in prompts for text in texts]
        made = deployment.forward(Batch(rows), micro_batch_tokens=micro_batch_tokens)
        found = iter(_result(made, timeout_s).logprobs)
        return [
            _expected(scores, [float(next(found)[-len(text) :].sum()) for text in texts])
            for _ in prompts
        ]

    return ask


def ask_for_replies(
    deployment: "RolloutDeployment",
    score: Callable[[Sample], float],
    sampling: "SamplingParams",
    timeout_s: float,
) -> Ask:
    """Ask the deployment for replies, and read them by `score`. Raises `InvalidRequestError`."""
    check_parameters(sampling)
    _check(None, timeout_s)

    def ask(prompts: list[list[int]]) -> list[float | Exception]:
        made = deployment.generate(prompts, sampling=sampling)
        return [_read(score, reply) for (reply,) in _result(made, timeout_s).samples]

    return ask


def ask_for_scores(
    deployment: "RewardDeployment", micro_batch_tokens: int, timeout_s: float
) -> Ask:
    """The reward model's scores. Raises `InvalidRequestError`."""
    _check(micro_batch_tokens, timeout_s)

    def ask(prompts: list[list[int]]) -> list[float]:
        made = deployment.score(Batch(prompts), micro_batch_tokens=micro_batch_tokens)
        found: list[float] = _result(made, timeout_s).scores.tolist()
        return found

    return ask


def _check(micro_batch_tokens: int | None, timeout_s: float) -> None:
    LIMITS["grading"]["timeout_s"].check("timeout_s", timeout_s)
    if micro_batch_tokens is not None:
        check_numbers("forward", {"micro_batch_tokens": micro_batch_tokens})


def _result(future: "Future[ResultT]", timeout_s: float) -> ResultT:
    """The result; an operation that takes too long is cancelled, so that it delays no other."""
    try:
        return future.result(timeout_s)
    except PlexRLError:
        if not future.done():
            # One that runs ends by itself; nobody waits for it any more.
            with suppress(ConflictError):
                future.cancel()
        raise


def _expected(scores: list[float], logprobs: list[float]) -> float:
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    return sum(map(float.__mul__, weights, scores)) / sum(weights)


def _read(score: Callable[[Sample], float], reply: Sample) -> float | Exception:
    if reply.finish_reason == "abort":
        return ExecutionError("the judge's reply was interrupted")
    try:
        return float(score(reply))
    except Exception as error:
        # The controller's own code; it is the failure of this sample alone.
        return error
