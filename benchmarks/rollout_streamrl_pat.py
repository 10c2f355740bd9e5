"""Measures StreamRL's and PAT's schedules on simulated engines, beside the synchronous baseline.

    python -m benchmarks.rollout_streamrl_pat [--quick] [--json] [--workers=N]

StreamRL §7: Qwen2.5 7B, 32B and 72B on 32, 64 and 128 H800 GPUs, PPO with a critic and a reference
of the same size, 1024 prompts with one response, DeepSeek-R1's long lengths at most 20 000 tokens,
and scaled to a half and a quarter. Samples per second by those of `sync` on the same GPUs, each
system with the tensor-parallel size with which it is fastest on the first seed: `skew_*` with
skewness-aware dispatch, `sync_*` also with streamed batches, `async_*` also one step ahead.
`sync_max` and `async_max` are the largest of models and lengths, `breakdown_*` is Table 3.
`dispatch_*`: generation time with least-requests dispatch by that with ranks of the paper's ranker
(recall 0.87), of PlexRL's (0.71), of an oracle and of chance (Fig. 9). `allocation_gain`: Alg. 1 by
an even split (Fig. 10); `allocation_regret`: the best split by Alg. 1, less one.

PAT §5: LLaMA3.1-8B and Qwen3-14B, 128 prompts, DeepScaleR's lengths, steps in which a response
reaches the limit. `pat_generation_cut`: part of the generation time with the best static size that
adaptive sizes save, for the 8B model on H100 with at most 24 576 tokens; `pat_generation_cut_tp2`:
of that with groups of 2, whose times are those of the paper's baseline. `pat_regret`: its time by
that of an oracle, less one.

Means over seeds with their standard deviation. `ranker_recall_20` is that of
`benchmarks/rollout_ranker.py`. All figures follow from the model of docs/simulating_rollouts.md,
and are the same on every machine.
"""

import sys

from benchmarks import rollout_ranker
from benchmarks.report import report
from benchmarks.simulating.pat_figures import pat_rows, pat_sensitivity_rows
from benchmarks.simulating.streamrl_figures import (
    allocation_rows,
    dispatch_rows,
    gain_rows,
    sensitivity_rows,
)
from plexrl.sim.rollout.runs.split import runner

COLUMNS = ("setting", "system", "gain", "paper", "generation s", "training s", "step s", "GPUs, TP")


def main() -> None:
    """Run all parts."""
    given = [word for word in sys.argv[1:] if word.startswith("--workers=")]
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    with runner(int(given[0].partition("=")[2]) if given else None) as run:
        for part in (
            *(gain_rows, dispatch_rows, allocation_rows, sensitivity_rows),
            *(pat_rows, pat_sensitivity_rows),
        ):
            rows += part(run, figures)
    recalls: dict[str, float] = {}
    table = rollout_ranker.quantiles()
    rollout_ranker.recalls(1, table, rollout_ranker.VISIBLE, [], recalls)
    found = {name: recalls[name] for name in recalls if name.startswith("ranker_")}
    figures |= found
    text = " / ".join(f"{each:.2f}" for each in found.values())
    rows.append(("recall of 20, 10, 5 %", "ranker", text, "0.87 / 0.82 / 0.76", *[""] * 4))
    report("StreamRL and PAT, simulated", COLUMNS, rows, figures)


if __name__ == "__main__":
    main()
