"""Measures the time that rewards add to a training step, and what timeouts of test cases save.

    python -m benchmarks.rewards_overlap [--quick] [--json]

*Overlap.* One embedded cluster generates a batch, grades it, and trains on it: `forward_backward`
and `optim_step`, with a learning rate of 0, so that all steps of a round have the same samples. A
sample's reward is a *program* that runs in the sandbox, or the opinion of a *judge*, a model of the
policy's size on the trainer's GPU. Three ways to grade, in turn in each round: *one by one* after
the generation (a plain loop), *together* after it (`Graded.grade_stream` of finished samples), and
*while generating* (`Graded.grade_stream` of the stream). `share_*` is the share of the step's time
from the end of the generation to the last reward; `speedup_*` compares whole steps with one by one.
Generation is made as long, compared with the rewards, as in Flexes Table 1 (rewards 7 to 13 % of
a step). An untrained model ends samples with a probability of about 1/65 per token, so they end
one by one. Programs, judge and generation share this machine's CPUs.

*Timeouts.* 5 % of the programs never end, as in Flexes Fig. 7a. They and the others are graded with
a fixed timeout, and with adaptive ones whose bounds have the paper's proportions (2 s to 30 s, here
0.4 s to 6 s).
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

import plexrl
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl import rewards
from plexrl.cluster.embedded.start import start_embedded

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
HIDDEN, LAYERS = sized((256, 5), quick=(32, 1))
PROMPTS, SAMPLES = sized((4, 8), quick=(2, 2))
CONCURRENT_SAMPLES = 8
JUDGED_TOKENS = 1024
"""A micro-batch of the judge: on a CPU padding costs as much as tokens."""
ROUNDS = sized(3, quick=1)
PROGRAMS = sized(100, quick=20)
LOOPS_EVERY = 20
FIXED_S = 6.0
ADAPTIVE = rewards.TimeoutSettings(factor=1.5, min_s=0.4, max_s=FIXED_S)
FIXED = rewards.TimeoutSettings(factor=1.0, min_s=FIXED_S, max_s=FIXED_S)
TEST = rewards.ProgramTest("20\n", "6765")
FIBONACCI = """
a, b = 0, 1
for _ in range(int(input())):
    a, b = b, a + b
print(a)
"""
WAYS = ("one_by_one", "together", "while_generating")
Reward = Callable[[list[int], plexrl.Sample], "rewards.Grade | float"]


def overlap(sandbox: rewards.Sandbox) -> Iterator[tuple[str, float]]:
    """For each kind of reward, its share of a step in each way, and the speed-up of the step."""
    programs = rewards.ProgramGrader(sandbox)

    def program(_: list[int], sample: plexrl.Sample) -> rewards.Grade:
        return programs.grade(f"# {len(sample.tokens)} tokens\n{FIBONACCI}", [TEST])

    def asked(prompt: list[int], sample: plexrl.Sample) -> list[int]:
        return [*prompt, *sample.tokens, 7]

    with (
        closing(start_embedded()) as embedded,
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("rewards") as job,
    ):
        step = _Step(job)
        model = plexrl.tiny_qwen2(VOCABULARY, seed=1, hidden=HIDDEN, layers=LAYERS)
        judging = job.reference_deployment("judge", model)
        judge = judging.judge(
            prompt=asked, answers=[([5], 1.0), ([6], 0.0)], micro_batch_tokens=JUDGED_TOKENS
        )
        for kind, reward in (("program", program), ("judge", judge.score)):
            step.run(reward, WAYS[0], 0)
            rounds = [
                {way: step.run(reward, way, seed + 1) for way in WAYS} for seed in range(ROUNDS)
            ]
            for way in WAYS:
                yield f"share_{kind}_{way}", statistics.median(each[way][1] for each in rounds)
            for way in WAYS[1:]:
                ratios = (each[WAYS[0]][0] / each[way][0] for each in rounds)
                yield f"speedup_{kind}_{way}", statistics.median(ratios)


class _Step:
    """Training steps of one job."""

    def __init__(self, job: plexrl.Job) -> None:
        model = plexrl.tiny_qwen2(VOCABULARY, hidden=HIDDEN, layers=LAYERS)
        self._prompts = [[3 + index, 4, 5] for index in range(PROMPTS)]
        self._actor = job.train_deployment("actor", model)
        self._rollout = job.rollout_deployment(
            "rollout", model, max_concurrent_samples=CONCURRENT_SAMPLES
        )

    def run(self, reward: Reward, way: str, seed: int) -> tuple[float, float]:
        """Seconds of a step, and the share in which only rewards were waited for."""
        sampling = plexrl.SamplingParams(max_tokens=400, seed=seed)
        graded = rewards.Graded[plexrl.Sample](
            reward, on_failure="raise", at_once=PROMPTS * SAMPLES
        )
        began = time.monotonic()
        future = self._rollout.generate(self._prompts, n=SAMPLES, sampling=sampling, stream="rows")
        generated_s = 0.0

        def finished() -> Iterator[tuple[int, int, plexrl.Sample]]:
            nonlocal generated_s
            yield from future.samples()
            generated_s = time.monotonic() - began

        match way:
            case "while_generating":
                found = graded.grade_stream(self._prompts, SAMPLES, finished()).rewards
            case "together":
                found = graded.grade_stream(self._prompts, SAMPLES, list(finished())).rewards
            case _:
                found = np.empty((PROMPTS, SAMPLES))
                for row, column, sample in list(finished()):
                    grade = reward(self._prompts[row], sample)
                    found[row, column] = grade if isinstance(grade, float) else grade.score
        assert (found > 0.0).all()
        graded_s = time.monotonic() - began
        batch = plexrl.Batch.from_samples(self._prompts, future.result().samples, found)
        self._actor.forward_backward(batch, plexrl.losses.importance_sampling())
        self._actor.optim_step(learning_rate=0.0).result()
        step_s = time.monotonic() - began
        return step_s, (graded_s - generated_s) / step_s


def timeouts(sandbox: rewards.Sandbox) -> Iterator[tuple[str, float]]:
    """How much faster all programs are graded with adaptive timeouts, and the lost passes."""
    seconds: dict[str, float] = {}
    passed: dict[str, int] = {}
    for name, settings in (("fixed", FIXED), ("adaptive", ADAPTIVE)):
        grader = rewards.ProgramGrader(sandbox, timeouts=settings)
        # The test case has had one correct run.
        assert grader.grade(FIBONACCI, [TEST]).score
        graded = rewards.Graded[int](_program(grader), on_failure="raise")
        began = time.monotonic()
        found = graded.grade([[0]] * PROGRAMS, [[index] for index in range(PROGRAMS)])
        seconds[name] = time.monotonic() - began
        passed[name] = int(found.rewards.sum())
    yield "timeouts_speedup", seconds["fixed"] / seconds["adaptive"]
    yield "timeouts_passes_lost", float(passed["fixed"] - passed["adaptive"])


def _program(grader: rewards.ProgramGrader) -> Callable[[list[int], int], rewards.Grade]:
    def reward(_: list[int], index: int) -> rewards.Grade:
        is_endless = index % LOOPS_EVERY == LOOPS_EVERY - 1
        return grader.grade("while True: pass" if is_endless else FIBONACCI, [TEST])

    return reward


def main() -> None:
    """Print the figures."""
    with rewards.Sandbox() as sandbox:
        figures = dict([*overlap(sandbox), *timeouts(sandbox)])
    rows = [(name.replace("_", " "), f"{figure:.3f}") for name, figure in figures.items()]
    report("Rewards of programs in the sandbox, and of a judge", ("figure", "value"), rows, figures)


if __name__ == "__main__":
    main()
