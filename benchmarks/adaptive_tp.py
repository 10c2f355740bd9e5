"""Measures how far the switch controller of tensor-parallel groups is from one that knows all.

    python -m benchmarks.adaptive_tp [--quick] [--json]

An engine of 8 ranks drains a batch: it starts in groups of 2 ranks, rows end and are not replaced.
Its step times are those of PAT Fig. 4 (LLaMA3.1-8B on eight A40): 15.37 and 9.64 ms of a single row
with tp 2 and 8, 24.41 and 30.87 ms of 128 rows; tp 4 is between them; each token of context adds
the time to read its KV cache. A switch takes 1 s, or 5.5 s as PAT §5.4 measured, and what the KV
cache takes at 10 or 2 GB/s. Response lengths are log-normal with the tail of PAT Fig. 3b: 10.85 %
above 8K tokens, 2.18 % above 16K; cut at the longest response. The predictor is exact, so that only
the decisions are compared. The controller decides every 32 steps, and knows 512 past lengths.

`regret_*`: by how much the batch takes longer than with the controller that knows each row's length
and may plan 32 moments; mean over the batches, in percent. `paper`: Alg. 1 as it is, with the
longest response for each row. `mean`: each row ends at the mean of the past lengths beyond its own.
`now`: the projection of `plexrl.rollout.policies.adaptive_tp.projection`, compared with no switch,
as in Alg. 1. `plan`: the same, and a switch may come later: what a rollout does. `gain_*`: time
with tp 2 throughout, divided by the time of the controller; `gain_best_fixed`: by that of the best
fixed size.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.client.data.decode_profile import DecodeProfile, ProfilePoint, ProfileSubject
from plexrl.rollout.policies.adaptive_tp.controller import SwitchController
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.projection import DecodingRow, bound, project
from plexrl.rollout.policies.adaptive_tp.remaining import UnfinishedRow, remaining_s

SIZES = (2, 4, 8)
RANKS = SIZES[-1]
STEP_MS = {2: (15.37, 24.41), 4: (11.6, 26.0), 8: (9.64, 30.87)}
"""By tp: one row, and 128 rows over all groups."""
TOKEN_BYTES = 131_072
MEMORY_BYTES_PER_S = 600e9
FLOPS = 60e12
PROMPT = 200
PAST = 512
EVERY = 32
BATCHES = sized(8, quick=2)
LONGEST = sized((4096, 16_384), quick=(2048,))
ROWS = sized((32, 128, 256), quick=(48,))
SWITCHES = ((1.0, 10e9), (5.5, 2e9))

Groups = list[list["Row"]]
Project = Callable[[list[list[DecodingRow]], Sequence[int]], list[list[UnfinishedRow]]]


@dataclass(slots=True)
class Row:
    """A row with the length that it will have."""

    length: int
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Controller:
    """How switches are decided."""

    moments_max: int
    project: Project | None
    """None: the true lengths."""


def main() -> None:
    """Print the table."""
    controllers = {
        "knows all": Controller(32, None),
        "paper": Controller(1, lambda groups, _: bound(groups)),
        "mean": Controller(1, mean_beyond),
        "now": Controller(1, project),
        "plan": Controller(16, project),
    }
    rows, regrets, gains = [], dict[str, list[float]](), dict[str, list[float]]()
    for switch_s, bandwidth in SWITCHES:
        predictor = LatencyPredictor(profile(switch_s, bandwidth))
        for longest in LONGEST:
            for count in ROWS:
                found = measure(predictor, controllers, longest, count)
                knows = found["knows all"]
                cells = [f"{switch_s:g}", f"{longest}", f"{count}"]
                for name in controllers:
                    gain = fmean(a / b for a, b in zip(found["tp 2"], found[name], strict=True))
                    gains.setdefault(name, []).append(gain)
                    regret = 100 * (fmean(found[name]) / fmean(knows) - 1)
                    regrets.setdefault(name, []).append(regret)
                    cells.append(f"{gain:.2f}" if name == "knows all" else f"{regret:.2f}")
                fixed = min(fmean(found[f"tp {size}"]) for size in SIZES)
                gains.setdefault("best_fixed", []).append(fixed / fmean(found["plan"]))
                rows.append((*cells, f"{gains['plan'][-1]:.2f}", f"{gains['best_fixed'][-1]:.2f}"))
    figures = {f"regret_{name}_percent": fmean(regrets[name]) for name in list(controllers)[1:]}
    figures |= {f"regret_{name}_percent_max": max(regrets[name]) for name in list(controllers)[1:]}
    figures |= {"gain_plan": fmean(gains["plan"]), "gain_best_fixed": fmean(gains["best_fixed"])}
    report(
        "A batch drains on 8 ranks: regret in percent, by controller",
        (
            *("switch s", "longest", "rows", "gain of all-knowing"),
            *("paper %", "mean %", "now %", "plan %", "gain over tp 2", "over best fixed"),
        ),
        rows,
        figures,
    )


def measure(
    predictor: LatencyPredictor, controllers: dict[str, Controller], longest: int, count: int
) -> dict[str, list[float]]:
    """Seconds of each batch, by controller and by fixed size."""
    rng = random.Random(longest + count)
    found: dict[str, list[float]] = {}
    for _ in range(BATCHES):
        past = lengths(rng, PAST, longest)
        batch = lengths(rng, count, longest)
        for size in SIZES:
            seconds = drain(predictor, None, size, batch, past, longest)
            found.setdefault(f"tp {size}", []).append(seconds)
        for name, each in controllers.items():
            seconds = drain(predictor, each, SIZES[0], batch, past, longest)
            found.setdefault(name, []).append(seconds)
    return found


def drain(
    predictor: LatencyPredictor,
    controller: Controller | None,
    tp: int,
    batch: Sequence[int],
    past: Sequence[int],
    longest: int,
) -> float:
    """Seconds until all rows have ended."""
    decides = SwitchController(predictor, moments_max=controller.moments_max if controller else 1)
    groups = dealt([Row(length) for length in batch], tp)
    seconds = 0.0
    while rows := [row for group in groups for row in group]:
        if controller is not None:
            switch = decides.decide(tp, projected(controller, groups, past, longest))
            if switch is not None:
                new = dealt(rows, switch.tp)
                seconds += switch_s(predictor, tp, groups, switch.tp, new)
                tp, groups = switch.tp, new
        steps = [
            [UnfinishedRow(PROMPT + row.drawn, min(EVERY, row.length - row.drawn)) for row in group]
            for group in groups
        ]
        seconds += remaining_s(predictor, tp, steps)
        for row in rows:
            row.drawn += EVERY
        groups = [[row for row in group if row.drawn < row.length] for group in groups]
    return seconds


def projected(
    controller: Controller, groups: Groups, past: Sequence[int], longest: int
) -> list[list[UnfinishedRow]]:
    """The rows as the controller expects them to end."""
    if controller.project is None:
        return [
            [UnfinishedRow(PROMPT + row.drawn, row.length - row.drawn) for row in group]
            for group in groups
        ]
    known = [
        [DecodingRow(PROMPT + row.drawn, row.drawn, longest) for row in group] for group in groups
    ]
    return controller.project(known, past)


def mean_beyond(groups: list[list[DecodingRow]], past: Sequence[int]) -> list[list[UnfinishedRow]]:
    """Each row ends at the mean of the past lengths beyond its own."""
    ascending = sorted(past)
    sums = [0, *accumulate(reversed(ascending))]
    found: list[list[UnfinishedRow]] = []
    for group in groups:
        found.append([])
        for row in group:
            longer = len(past) - bisect_right(ascending, row.drawn)
            final = -(-sums[longer] // longer) if longer else row.most
            found[-1].append(UnfinishedRow(row.tokens, max(1, final - row.drawn)))
    return found


def dealt(rows: list[Row], tp: int) -> Groups:
    """The rows in groups of `tp` ranks, in equal numbers: those with most tokens first, since an
    engine does not know which will be longest."""
    ordered = sorted(rows, key=lambda row: -row.drawn)
    return [ordered[index :: RANKS // tp] for index in range(RANKS // tp)]


def switch_s(
    predictor: LatencyPredictor, tp: int, groups: Groups, new_tp: int, new: Groups
) -> float:
    """Seconds of a switch from groups to new ones."""
    tokens = max(sum(PROMPT + row.drawn for row in group) for group in groups)
    prefills = []
    for group in new:
        if group:
            rms = math.sqrt(fmean((PROMPT + row.drawn) ** 2 for row in group))
            prefills.append(predictor.prefill_s(new_tp, len(group), rms))
    return predictor.switch_cost(predictor.move_s(tp, new_tp, tokens), max(prefills)).seconds


def profile(switch_s: float, kv_bytes_per_s: float) -> DecodeProfile:
    """A profile as PAT §4.2 would measure it."""
    points = []
    for tp in SIZES:
        one, many = STEP_MS[tp]
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            all_rows = rows * RANKS // tp
            for tokens in (8, 64, 512, 4096, 16_384):
                step_ms = one + (many - one) * (all_rows - 1) / 127
                read_s = rows * tokens * TOKEN_BYTES / tp / MEMORY_BYTES_PER_S
                prefill_s = rows * tokens * 2 * 8e9 / (tp * FLOPS)
                points.append(
                    ProfilePoint(
                        tp=tp,
                        rows=rows,
                        prompt_tokens=tokens,
                        kv_tokens=rows * tokens,
                        step_s=step_ms / 1e3 + read_s,
                        prefill_s=prefill_s,
                    )
                )
    subject = ProfileSubject(
        model="LLaMA3.1-8B",
        dtype="bfloat16",
        device="A40",
        tp_sizes=SIZES,
        kv_token_bytes=TOKEN_BYTES,
    )
    return DecodeProfile(
        subject=subject, points=tuple(points), switch_s=switch_s, kv_bytes_per_s=kv_bytes_per_s
    )


def lengths(rng: random.Random, count: int, longest: int) -> list[int]:
    """Response lengths of PAT Fig. 3b."""
    sigma = math.log(2) / (2.018 - 1.2346)
    mean = math.log(8192) - 1.2346 * sigma
    return [max(1, min(longest, int(rng.lognormvariate(mean, sigma)))) for _ in range(count)]


if __name__ == "__main__":
    main()
