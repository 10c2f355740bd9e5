"""Logprobs of the sampling policy, likeliest tokens and logprobs of prompts, against
`transformers` and plain torch."""

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.generation import Generation
from tests.worker.training.cases import GEMMA3, LLAMA, resized

TIED = tiny_qwen2("0123456789abcdefghi", seed=2)
UNTIED = resized(TIED, "qwen2", tie_word_embeddings=False)
PROMPTS = [[3, 4, 5, 6], [7], [*range(3, 21), *range(3, 21)], [14, 15], [3, 4, 5, 6]]
"""Several blocks of the cache, one token, and the same prompt twice."""
TOP = 4


def run(model: nn.Module, *made: Generation, **options: Any) -> Engine:
    engine = Engine(model, **{"slots": 16, "sequence_tokens_max": 64, **options})
    for each in made:
        engine.submit(each)
    while engine.has_work:
        engine.step()
        engine.check_invariants()
    return engine


def generation(name: str, prompts: list[list[int]], n: int = 1, **sampling: Any) -> Generation:
    params = SamplingParams(**{"ignore_eos": True, "seed": 1, "max_tokens": 9, **sampling})
    return Generation(
        name=name,
        prompts=prompts,
        samples_per_prompt=n,
        sampling=params,
        emit=None,
        weights_seq=0,
    )


def all_logprobs(model: nn.Module, row: list[int]) -> torch.Tensor:
    """Of every token of the vocabulary in each place but the first, `[tokens - 1, V]`."""
    with torch.no_grad():
        return torch.as_tensor(model(torch.tensor([row])).logits.log_softmax(-1)[0, :-1])


def drawn_from(logprobs: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The distribution of one token `[V]`, token by token."""
    scaled = (logprobs.double() / sampling.temperature).softmax(-1)
    order = scaled.argsort(descending=True, stable=True).tolist()
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = float(scaled[order].sum())
    kept: list[int] = []
    reached = 0.0
    for token in order:
        if reached >= sampling.top_p and kept:
            break
        kept.append(token)
        reached += float(scaled[token]) / total
    found = torch.zeros_like(scaled)
    found[kept] = scaled[kept]
    return found / found.sum()


@pytest.mark.parametrize("spec", [UNTIED, GEMMA3], ids=lambda s: str(s.architecture))
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 0.7},
        {"temperature": 0.8, "top_k": 3},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
    ],
    ids=str,
)
def test_sampling_logprobs_are_those_of_the_distribution_that_drew_the_token(
    spec: ModelSpec, how: dict[str, float]
) -> None:
    model = build_model(spec)
    found = generation("g", PROMPTS, 2, sampling_logprobs=True, **how)
    # A generation that asks for nothing runs in the same steps.
    run(model, found, plain := generation("plain", PROMPTS, 2, **how))
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in plain.tokens]
    assert set(plain.arrays()) == {"tokens", "lengths", "logprobs", "finish"}
    for row, tokens in enumerate(found.tokens):
        prompt, details = PROMPTS[row // 2], found.details[row]
        assert details is not None
        places = all_logprobs(model, [*prompt, *tokens.tolist()])[len(prompt) - 1 :]
        for place, token, value, own in zip(
            places,
            tokens,
            details.sampling_logprobs,
            found.logprobs[row],
            strict=True,
        ):
            wanted = drawn_from(place, found.sampling)
            assert value == pytest.approx(float(wanted[token].log()), abs=2e-4)
            assert own == pytest.approx(float(place[token]), abs=2e-4)
    assert found.arrays()["sampling_logprobs"].shape == found.arrays()["logprobs"].shape


def test_a_greedy_policy_draws_each_token_with_certainty() -> None:
    found = generation("g", PROMPTS, temperature=0.0, sampling_logprobs=True)
    run(build_model(TIED), found)
    assert not found.arrays()["sampling_logprobs"].any()


@pytest.mark.parametrize("spec", [TIED, UNTIED], ids=lambda s: str(s.architecture))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_logprobs_are_the_likeliest_tokens_of_the_model_itself(
    spec: ModelSpec, temperature: float
) -> None:
    model = build_model(spec)
    found = generation("g", PROMPTS, temperature=temperature, top_logprobs=TOP)
    run(model, found, generation("other", PROMPTS, 2, top_logprobs=1, sampling_logprobs=True))
    arrays = found.arrays()
    start = 0
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        wanted = all_logprobs(model, [*prompt, *tokens.tolist()])[len(prompt) - 1 :].topk(TOP)
        own = slice(start, start + len(tokens))
        assert np.allclose(arrays["top_logprobs"][own], wanted.values, atol=2e-4)
        assert np.array_equal(arrays["top_ids"][own], wanted.indices)
        if temperature == 0.0:
            assert np.array_equal(arrays["top_ids"][own, 0], tokens)
        start = own.stop


def test_a_preempted_sample_keeps_the_numbers_of_its_tokens() -> None:
    model = build_model(TIED)
    wanted = {"max_tokens": 24, "sampling_logprobs": True, "top_logprobs": TOP, "temperature": 0.7}
    whole, parts = (generation(name, PROMPTS, 3, **wanted) for name in ("whole", "parts"))
    run(model, whole)
    block = Engine(model, slots=1, sequence_tokens_max=64, block_tokens=4).stats().block_bytes
    engine = run(model, parts, slots=6, block_tokens=4, kv_bytes_max=17 * block)
    assert engine.stats().preemptions
    one, other = whole.arrays(), parts.arrays()
    for name in ("tokens", "top_ids"):
        assert np.array_equal(one[name], other[name]), name
    for name in ("logprobs", "sampling_logprobs", "top_logprobs"):
        assert np.allclose(one[name], other[name], atol=2e-4), name


def test_rows_hold_little_more_memory_than_their_result_has() -> None:
    model = build_model(TIED)
    made = generation("g", [[3]] * 8, 2, max_tokens=200, top_logprobs=1, sampling_logprobs=True)
    # A generation in the same steps that wants more adds nothing to the rows of the first one.
    other = generation("other", [[4]], max_tokens=200, top_logprobs=13)
    run(model, generation("warm", [[3]], top_logprobs=1))
    gc.collect()
    tracemalloc.start()
    try:
        run(model, made, other, slots=32, sequence_tokens_max=256)
        other.details.clear()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 2 * sum(array.nbytes for array in made.arrays().values())


@pytest.mark.parametrize("spec", [TIED, LLAMA, GEMMA3], ids=lambda s: str(s.architecture))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_tokens_max": 5, "slots": 4, "block_tokens": 4},
        {"slots": 6, "block_tokens": 4, "sequence_tokens_max": 48, "kv_bytes_max": "one sequence"},
    ],
    ids=["at once", "in parts", "preempted"],
)
def test_prompt_logprobs_are_those_of_a_plain_forward(
    spec: ModelSpec, options: dict[str, Any]
) -> None:
    model = build_model(spec)
    if "kv_bytes_max" in options:
        sizes = Engine(model, slots=1, sequence_tokens_max=48, block_tokens=4).stats()
        options = {**options, "kv_bytes_max": 14 * sizes.block_bytes}
    # The first one leaves the prompts in the cache, from which the others may not take them.
    before = generation("before", PROMPTS)
    made = [
        generation("a", PROMPTS, 3, prompt_logprobs=True, max_tokens=4),
        generation("b", PROMPTS, prompt_top_logprobs=TOP, top_logprobs=1),
    ]
    engine = run(model, before, *made, **options)
    assert (engine.stats().preemptions > 0) == ("kv_bytes_max" in options)
    plain = generation("plain", PROMPTS, 3, max_tokens=4)
    run(model, plain)
    assert [row.tolist() for row in made[0].tokens] == [row.tolist() for row in plain.tokens]
    assert "prompt_top_ids" not in made[0].arrays()
    for each in made:
        arrays, start = each.arrays(), 0
        for prompt in PROMPTS:
            own = arrays["prompt_logprobs"][start : start + len(prompt)]
            places = all_logprobs(model, prompt)
            wanted = places.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
            assert own[0] == 0.0
            assert np.allclose(own[1:], wanted, atol=2e-4)
            if each.name == "b":
                top = places.topk(TOP)
                part = slice(start + 1, start + len(prompt))
                assert np.allclose(arrays["prompt_top_logprobs"][part], top.values, atol=2e-4)
                assert np.array_equal(arrays["prompt_top_ids"][part], top.indices)
                assert (arrays["prompt_top_ids"][start] == -1).all()
            start += len(prompt)


def test_a_prompt_that_no_pass_computed_has_no_logprobs() -> None:
    engine = Engine(build_model(TIED), slots=1, sequence_tokens_max=64, step_tokens_max=8)
    made = generation("g", [PROMPTS[2], PROMPTS[0]], prompt_top_logprobs=2)
    engine.submit(made)
    engine.step()
    engine.abort("g")
    assert engine.step() == [made]
    arrays = made.arrays()
    known = np.isfinite(arrays["prompt_logprobs"])
    assert known[: 8 + 1].all()
    assert not known[9 : len(PROMPTS[2])].any()
    assert (arrays["prompt_top_ids"][9:] == -1).all()
