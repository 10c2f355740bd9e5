"""Compares the built-in rollout engine with `generate` of `transformers` on the same requests.

    python benchmarks/engine.py [--quick] [--json]

Ragged requests have prompts of 4 to 64 tokens and answers of 8 to 192 with a long tail. `generate`
gets all of them as one left-padded batch and runs until the longest answer is done; only tokens
that were asked for count. Even requests are all of one size, so that `generate` wastes nothing.
Queued requests are ragged, four times as many as run at once: `generate` takes them batch by
batch, the engine as slots come free. Decoding is greedy, and a run in which the engine's tokens are
not those of `generate` fails. Rounds of the two alternate; each figure is the best round.
"""

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine import Generation, TorchRolloutBackend
from plexrl.worker.rollout.rollout_engine import RolloutEngine

CONCURRENT = sized((1, 8, 32, 256), quick=(1, 2))
BAR = sized(32, quick=2)
ROUNDS = sized(5, quick=1)
SPEC = DeploymentSpec(
    model=tiny_qwen2("".join(chr(code) for code in range(33, 126)), seed=3),
    kind="rollout",
    backend="torch",
    workers=1,
)
MODEL = build_model(SPEC.model)
Request = tuple[list[int], int]
"""A prompt and the number of tokens to generate."""


def ragged(count: int) -> list[Request]:
    """Requests whose answers have a median of about 40 tokens and a mean of about 55."""
    chance = random.Random(count)
    return [
        (
            [chance.randrange(3, 90) for _ in range(chance.randint(4, 64))],
            min(192, max(8, int(chance.lognormvariate(3.7, 0.8)))),
        )
        for _ in range(count)
    ]


def even(count: int) -> list[Request]:
    """Requests of equal size."""
    chance = random.Random(count)
    return [([chance.randrange(3, 90) for _ in range(32)], 64) for _ in range(count)]


def by_transformers(model: Any, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """(seconds, answers) of one batch."""
    longest = max(len(prompt) for prompt, _ in requests)
    tokens = torch.zeros((len(requests), longest), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, (prompt, _) in enumerate(requests):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    start = time.perf_counter()
    found = model.generate(
        tokens.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max(count for _, count in requests),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    ).cpu()
    seconds = time.perf_counter() - start
    answers = found[:, longest:].tolist()
    return seconds, [answer[:count] for answer, (_, count) in zip(answers, requests, strict=True)]


def by_engine(engine: RolloutEngine, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """(seconds, answers)."""
    made = [
        Generation(
            name=str(row),
            prompts=[prompt],
            samples_per_prompt=1,
            sampling=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
            emit=None,
            weights_seq=0,
        )
        for row, (prompt, count) in enumerate(requests)
    ]
    start = time.perf_counter()
    for generation in made:
        engine.submit(generation)
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    return seconds, [generation.tokens[0].tolist() for generation in made]


def new_engine(at_once: int) -> RolloutEngine:
    """An engine without a cache of earlier requests."""
    # Of the backend, so that the weights lie in an arena as they do in a worker.
    backend = TorchRolloutBackend(
        replace(SPEC, max_concurrent_samples=at_once, max_sequence_tokens=256), Path()
    )
    backend.lay_out()
    backend.materialise()
    return backend.engine


def in_batches(requests: list[Request], at_once: int) -> tuple[float, list[list[int]]]:
    """`generate`, batch after batch."""
    seconds, answers = 0.0, []
    for first in range(0, len(requests), at_once):
        took, found = by_transformers(MODEL, requests[first : first + at_once])
        seconds += took
        answers += found
    return seconds, answers


def compare(requests: list[Request], at_once: int) -> tuple[float, float]:
    """Tokens per second of `generate` and of the engine."""
    wanted = in_batches(requests, at_once)[1]
    found = by_engine(new_engine(at_once), requests)[1]
    assert found == wanted, "the engine's greedy tokens are not those of transformers"
    theirs = ours = float("inf")
    for _ in range(ROUNDS):
        theirs = min(theirs, in_batches(requests, at_once)[0])
        ours = min(ours, by_engine(new_engine(at_once), requests)[0])
    tokens = sum(count for _, count in requests)
    return tokens / theirs, tokens / ours


def main() -> None:
    """Measure and print the figures."""
    torch.set_num_threads(1)
    cases = [
        (kind, count, make(count))
        for count in CONCURRENT
        for kind, make in (("ragged", ragged), ("even", even))
    ]
    cases.append(("queued", BAR, ragged(4 * BAR)))
    rows, figures = [], {}
    for kind, count, requests in cases:
        theirs, ours = compare(requests, count)
        rows.append((f"{count} {kind}", f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.2f}"))
        figures[f"{kind}_{count}_tokens_per_s"] = ours
        figures[f"{kind}_{count}_vs_transformers"] = ours / theirs
    figures["engine_vs_transformers"] = figures[f"ragged_{BAR}_vs_transformers"]
    parameters = sum(parameter.numel() for parameter in MODEL.parameters())
    report(
        f"Greedy decoding, one thread, {parameters:,} parameters",
        ("requests at once", "generate, tokens/s", "engine, tokens/s", "ratio"),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
