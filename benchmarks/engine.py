"""The built-in rollout engine beside `transformers`' `generate`, same model, same requests.

    python benchmarks/engine.py [--json]

Requests are ragged: prompts of 4 to 64 tokens, answers of 8 to 192 with a long tail. `generate`
gets all of them as one left-padded batch and runs until the longest answer is done; only tokens
that were asked for count. `even` is the same with one prompt length and one answer length, where
`generate` wastes nothing. Decoding is greedy; an engine whose tokens differ measures nothing, so
the run fails then.
"""

import random
import time

import torch

from benchmarks.report import report
from plexrl.model_spec import tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.engine import Engine, Generation
from plexrl.worker.models import build_model

CONCURRENT = (1, 8, 32, 256)
BAR = 32
ROUNDS = 3
MODEL = build_model(tiny_qwen2("".join(chr(code) for code in range(33, 126)), seed=3))
Request = tuple[list[int], int]
"""A prompt and how many tokens are to follow."""


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
    """Requests that are all alike in size."""
    chance = random.Random(count)
    return [([chance.randrange(3, 90) for _ in range(32)], 64) for _ in range(count)]


def by_transformers(requests: list[Request]) -> tuple[float, list[list[int]]]:
    """(seconds, answers)."""
    longest = max(len(prompt) for prompt, _ in requests)
    tokens = torch.zeros((len(requests), longest), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, (prompt, _) in enumerate(requests):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    start = time.perf_counter()
    found = MODEL.generate(  # type: ignore[operator]
        tokens,
        attention_mask=mask,
        max_new_tokens=max(count for _, count in requests),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    answers = found[:, longest:].tolist()
    return seconds, [answer[:count] for answer, (_, count) in zip(answers, requests, strict=True)]


def by_engine(requests: list[Request]) -> tuple[float, list[list[int]]]:
    """(seconds, answers)."""
    engine = Engine(MODEL, slots=len(requests), sequence_tokens_max=256)
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


def compare(requests: list[Request]) -> tuple[float, float]:
    """Tokens per second of `generate` and of the engine, each the best of a few rounds."""
    wanted = by_transformers(requests)[1]
    found = by_engine(requests)[1]
    assert found == wanted, "the engine's greedy tokens are not those of transformers"
    tokens = sum(count for _, count in requests)
    theirs = min(by_transformers(requests)[0] for _ in range(ROUNDS))
    ours = min(by_engine(requests)[0] for _ in range(ROUNDS))
    return tokens / theirs, tokens / ours


def main() -> None:
    """Measure and print the figures."""
    torch.set_num_threads(1)
    rows, figures = [], {}
    for count in CONCURRENT:
        for kind, requests in (("ragged", ragged(count)), ("even", even(count))):
            theirs, ours = compare(requests)
            rows.append(
                (f"{count} {kind}", f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.2f}")
            )
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
