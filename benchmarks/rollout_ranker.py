"""Measures the ranker of response lengths, and what its ranks gain on simulated engines.

    python -m benchmarks.rollout_ranker [--quick] [--json] [SOLUTIONS]

The traces have no prompts, so prompts and lengths are generated. A prompt is a sum of 2 to 60 terms
among filler words; its cost is the number of its multiplications, divisions and brackets, with
weights. Lengths have the distribution of the bundled DeepSeek R1 histogram, at most 20 000 tokens.
The correlation of responses to one prompt is 0.9, as in `plexrl.sim.rollout.workload`. `visible` is
the part of a prompt's own effect on the length that follows from its cost; the rest is in no token.
Nobody knows it for real prompts: 0.9 is a guess, and the table has others. So recall says how close
the ranker comes to what the data allow, not what it reaches on the prompts of StreamRL.

`ranker_recall_N`: part of the longest N % of the samples of unseen prompts that is among the N % of
which the ranker expects most. `ceiling_recall_N`: the same for the exact cost; `prompt_recall_N`:
for the exact effect of the prompt, which more text could not beat; `history_recall_20`: for a
ranker that has seen eight earlier responses to each prompt. Random ranks find N %. StreamRL Tab. 4
has 0.81 to 0.87, 0.75 to 0.82 and 0.68 to 0.76 with tuned language models.

With the path of `grade_school_math/data/example_model_solutions.jsonl` of
github.com/openai/grade-school-math, also recall on real questions and solutions of its models: a
ranker that has learned from 70 % of the 1319 questions, on the others, and beside it the length of
another model's solution to the same question, which is an example of what can be known of it.

`gain_*_N`: seconds in which 32 simulated instances generate a batch of N samples for each that is
dispatched at random, by those with the division of a live rollout and ranks of that kind (StreamRL
Fig. 9). `gain_blind_N` has random ranks; `gain_order_N` keeps the random dispatch, and only begins
with the longest on each instance. All of the same batches. Means over the batches.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.latency.costs import QWEN3_30B_A3B
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20
from plexrl.rollout.policies.length_dispatch import LONG_PART, DispatchedBatch, choose_division
from plexrl.rollout.policies.length_ranker import LengthExample, LengthRanker, Tokens, fit
from plexrl.rollout.trajectories.lengths import RECENT_MAX, RankedLength
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.traces.bundled import bundled
from plexrl.traces.formats import read_histogram
from plexrl.traces.generate.distributions import STANDARD

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Row = tuple[str, ...]

CORRELATION = 0.9
LIMIT = 20_000
VISIBLE = 0.9
TAILS = (20, 10, 5)
HISTORY = 8
"""Earlier responses to each prompt."""
TERMS_MAX = 60
SIGNS = (3, 4, 5, 6)
"""Tokens of +, *, / and a pair of brackets, and what each costs."""
COSTS = (1.0, 4.0, 6.0, 2.0)
INSTANCES = 32
BATCHES = sized(8, quick=2)
SHARES = sized((32, 64, 128), quick=(16,))
"""Samples of a batch for each instance."""
TRAINED = sized(4096, quick=512)
"""Prompts that the ranker has learned from."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """Prompts, and what decides how long their responses are."""

    prompts: list[Tokens]
    cost: Floats
    """Standard normal scores of their costs."""
    effect: Floats
    """Standard normal scores of the prompts themselves."""

    def lengths(self, rng: np.random.Generator, table: Floats) -> Ints:
        """Tokens of one response to each."""
        own = rng.standard_normal(len(self.prompts))
        scores = np.sqrt(CORRELATION) * self.effect + np.sqrt(1 - CORRELATION) * own
        places = [STANDARD.cdf(float(each)) * (len(table) - 1e-9) for each in scores]
        found: Ints = np.clip(table[np.array(places, dtype=int)], 1, LIMIT).astype(np.int64)
        return found


def tasks(rng: np.random.Generator, count: int, visible: float) -> Tasks:
    """Random tasks."""
    prompts, costs = [], []
    for _ in range(count):
        terms = int(rng.integers(2, TERMS_MAX + 1))
        chances = rng.dirichlet((4.0, 2.0, 1.0, 1.0))
        signs = rng.choice(4, size=terms, p=chances)
        numbers = rng.integers(10, 110, size=terms)
        words = rng.integers(200, 1200, size=int(rng.integers(0, 80)))
        sums = np.stack([np.array(SIGNS)[signs], numbers], axis=1).ravel()
        prompts.append(np.concatenate([words, sums]).astype(np.int32))
        costs.append(float(np.array(COSTS)[signs].sum()))
    ranks = np.argsort(np.argsort(costs))
    cost = np.array([STANDARD.inv_cdf((int(each) + 0.5) / count) for each in ranks])
    hidden = rng.standard_normal(count)
    return Tasks(prompts, cost, np.sqrt(visible) * cost + np.sqrt(1 - visible) * hidden)


def quantiles() -> Floats:
    """Response lengths of the R1 histogram, as equally likely values."""
    histogram = read_histogram(bundled("r1-lengths"))
    return np.array([histogram.quantile((at + 0.5) / 4096) for at in range(4096)])


def longest(values: Floats | Ints, part: float) -> set[int]:
    """The places of the largest values."""
    return set(np.argsort(-values, kind="stable")[: round(part * len(values))].tolist())


def recall(expected: Floats, lengths: Ints, part: float) -> float:
    """Part of the longest that is among those that are expected to be."""
    wanted = longest(lengths, part)
    return len(wanted & longest(expected, part)) / len(wanted)


def learned(rng: np.random.Generator, table: Floats, visible: float) -> LengthRanker:
    """A ranker that has seen one response to each of many prompts."""
    known = tasks(rng, TRAINED, visible)
    examples = zip(known.prompts, known.lengths(rng, table).tolist(), strict=True)
    found = fit([LengthExample(prompt, (tokens,)) for prompt, tokens in examples])
    assert found is not None
    return found


def expectations(ranker: LengthRanker, unseen: Tasks) -> Floats:
    """Of each prompt."""
    return np.array([float(ranker.expected_tokens(each)) for each in unseen.prompts])


def recalls(
    seed: int, table: Floats, visible: float, rows: list[Row], figures: dict[str, float]
) -> None:
    """Recall on unseen prompts."""
    rng = np.random.default_rng(seed)
    ranker = learned(rng, table, visible)
    unseen = tasks(rng, TRAINED, visible)
    lengths = unseen.lengths(rng, table)
    earlier = np.stack([unseen.lengths(rng, table) for _ in range(HISTORY)], axis=1)
    history = fit(
        [LengthExample(p, tuple(e)) for p, e in zip(unseen.prompts, earlier.tolist(), strict=True)]
    )
    assert history is not None
    kinds = {
        "ranker": expectations(ranker, unseen),
        "ceiling": unseen.cost,
        "history": expectations(history, unseen),
        "prompt": unseen.effect,
        "random": rng.random(len(lengths)),
    }
    for kind, expected in kinds.items():
        found = {tail: recall(expected, lengths, tail / 100) for tail in TAILS}
        rows.append(
            (
                f"recall, {visible:.0%} visible, {kind}",
                *(f"{each:.2f}" for each in found.values()),
            )
        )
        if visible == VISIBLE:
            figures |= {f"{kind}_recall_{tail}": round(each, 3) for tail, each in found.items()}
    if visible == VISIBLE:
        figures["explained"] = round(ranker.explained, 3)


def real_recalls(path: Path, rows: list[Row], figures: dict[str, float]) -> None:
    """Recall on questions and solutions that models wrote."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    names = [name for name in found[0] if isinstance(found[0][name], dict)]
    places = np.random.default_rng(3).permutation(len(found))
    known, unseen = np.split(places, [7 * len(found) // 10])
    lengths = {
        name: np.array([max(1, len(words(each[name]["solution"]))) for each in found])
        for name in names
    }
    prompts = [words(each["question"]) for each in found]
    kinds: dict[str, dict[int, list[float]]] = {"ranker": {}, "other": {}}
    for at, name in enumerate(names):
        ranker = fit([LengthExample(prompts[i], (int(lengths[name][i]),)) for i in known])
        assert ranker is not None
        expected = {
            "ranker": np.array([float(ranker.expected_tokens(prompts[i])) for i in unseen]),
            "other": lengths[names[at - 1]][unseen].astype(float),
        }
        for kind, values in expected.items():
            for tail in TAILS:
                part = recall(values, lengths[name][unseen], tail / 100)
                kinds[kind].setdefault(tail, []).append(part)
    for kind, by_tail in kinds.items():
        rows.append((f"real questions, {kind}", *(f"{fmean(by_tail[t]):.2f}" for t in TAILS)))
        figures |= {f"real_{kind}_recall_{t}": round(fmean(by_tail[t]), 3) for t in TAILS}


def words(text: str) -> Tokens:
    """A number for each word, digit and sign."""
    found = re.findall(r"\d|\w+|[^\w\s]", text.lower())
    return np.array([crc32(each.encode()) % 50_000 for each in found], dtype=np.int32)


def generation_s(assigned: Sequence[Sequence[SimulatedTrajectory]]) -> float:
    """Seconds until simulated instances have generated these trajectories, in this order each."""
    ends = []
    for number, trajectories in enumerate(assigned):
        instance = Instance(number, QWEN3_30B_A3B)
        instance.route(trajectories, 0.0)
        while (due := instance.next_event_s()) is not None:
            instance.advance(due)
        ends.append(instance.at_s)
    return max(ends)


def at_random(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Equally many places for each instance."""
    return [each.tolist() for each in np.array_split(rng.permutation(count), INSTANCES)]


def misses(expected: Floats | Ints, lengths: Ints) -> list[RankedLength]:
    """The latest responses with what was expected of them."""
    pairs = zip(expected.tolist(), lengths.tolist(), strict=True)
    return [RankedLength(max(1, int(each)), tokens) for each, tokens in pairs][-RECENT_MAX:]


def by_ranks(
    expected: Floats, past: Sequence[RankedLength], prompt_tokens: float
) -> list[list[int]]:
    """As a live rollout divides: the longest first, on instances of their own if that is sooner."""
    ordered = np.argsort(-expected, kind="stable").tolist()
    batch = DispatchedBatch(
        expected=[max(1, int(expected[at])) for at in ordered],
        samples=1,
        prompt_tokens=prompt_tokens,
        instances=INSTANCES,
        kv_budget=QWEN3_30B_A3B.kv_tokens,
    )
    count = choose_division(QWEN3_30B_A3B_ON_H20, batch, past)
    long = ordered[: int(LONG_PART * len(ordered))] if count else []
    regular = ordered[len(long) :]
    rest = INSTANCES - count
    return [
        *(long[at::count] for at in range(count)),
        *(regular[at::rest] for at in range(rest)),
    ]


def gains(seed: int, table: Floats, count: int) -> dict[str, list[float]]:
    """Seconds of each kind of dispatch, by batch of `count` samples."""
    rng = np.random.default_rng(seed)
    ranker = learned(rng, table, VISIBLE)
    found: dict[str, list[float]] = {}
    for _ in range(BATCHES):
        batch = tasks(rng, count, VISIBLE)
        lengths = batch.lengths(rng, table)
        before = tasks(rng, count, VISIBLE)
        recent = before.lengths(rng, table)
        tokens = fmean(len(each) for each in batch.prompts)

        def run(places: list[list[int]], batch: Tasks = batch, lengths: Ints = lengths) -> float:
            return generation_s(
                [
                    [
                        SimulatedTrajectory(
                            number=at,
                            group=at,
                            prompt_tokens=len(batch.prompts[at]),
                            response_tokens=int(lengths[at]),
                        )
                        for at in each
                    ]
                    for each in places
                ]
            )

        expected = expectations(ranker, batch)
        shuffled = at_random(rng, count)
        by_length: Callable[[int], float] = lambda at: -expected[at]  # noqa: B023, E731
        kinds = {
            "random": shuffled,
            "order": [sorted(each, key=by_length) for each in shuffled],
            "ranker": by_ranks(expected, misses(expectations(ranker, before), recent), tokens),
            "oracle": by_ranks(lengths.astype(float), misses(recent, recent), tokens),
            "blind": by_ranks(
                rng.permutation(lengths).astype(float),
                misses(rng.permutation(recent), recent),
                tokens,
            ),
        }
        for kind, places in kinds.items():
            found.setdefault(kind, []).append(run(places))
    return found


def main() -> None:
    """See the module."""
    table = quantiles()
    rows: list[Row] = []
    figures: dict[str, float] = {}
    for visible in (1.0, VISIBLE, 0.7, 0.4):
        recalls(1, table, visible, rows, figures)
    for name in sys.argv[1:]:
        if not name.startswith("-"):
            real_recalls(Path(name), rows, figures)
    for share in SHARES:
        seconds = gains(2, table, share * INSTANCES)
        for kind, each in seconds.items():
            gain = fmean(seconds["random"]) / fmean(each)
            name = f"{share} samples an instance, {kind}"
            rows.append((name, f"{fmean(each):.0f} s", f"{gain:.2f} x", ""))
            if kind != "random":
                figures[f"gain_{kind}_{share}"] = round(gain, 3)
    report(
        "Ranker of response lengths", ("", *(f"longest {tail} %" for tail in TAILS)), rows, figures
    )


if __name__ == "__main__":
    main()
