"""Measures the time that rewards add to a step, and what timeouts of test cases save.

    python -m benchmarks.rewards_overlap [--quick] [--json]

*Overlap.* One embedded cluster generates a batch; each sample's reward is a program that runs in
the sandbox. Three ways to grade, in turn in each round: *one by one* after the generation (a plain
loop), *together* after it (`Graded.grade`), and *while generating* (`Graded.grade_stream`).
`exposed_*` is the share of the step (generation and rewards) after the end of the generation. An
untrained model ends samples with a probability of about 1/65 per token, so they end one by one.

*Timeouts.* 5 % of the programs never end, as in Flexes Fig. 7a. They and the others are graded with
a fixed timeout, and with adaptive ones whose bounds have the paper's proportions (2 s to 30 s, here
0.4 s to 6 s).
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import plexrl
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl import rewards
from plexrl.cluster.embedded.start import start_embedded

VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPTS, SAMPLES = sized((4, 8), quick=(2, 2))
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


def overlap(sandbox: rewards.Sandbox) -> Iterator[tuple[str, float]]:
    """The exposed share of each way, and the time of a step relative to the first way."""
    programs = rewards.ProgramGrader(sandbox)

    def reward(_: list[int], sample: plexrl.Sample) -> rewards.Grade:
        return programs.grade(f"# {len(sample.tokens)} tokens\n{FIBONACCI}", [TEST])

    graded = rewards.Graded(reward, on_failure="raise")
    prompts = [[3 + index, 4, 5] for index in range(PROMPTS)]
    with (
        closing(start_embedded()) as embedded,
        plexrl.connect(embedded.url, embedded.api_key) as cluster,
        cluster.create_job("rewards") as job,
    ):
        model = plexrl.tiny_qwen2(VOCABULARY, hidden=32, layers=1)
        rollout = job.rollout_deployment("rollout", model, max_concurrent_samples=8)

        def step(way: str, seed: int) -> tuple[float, float]:
            sampling = plexrl.SamplingParams(max_tokens=400, seed=seed)
            began = time.monotonic()
            future = rollout.generate(prompts, n=SAMPLES, sampling=sampling, stream="rows")
            ended: list[float] = []

            def generated() -> Iterator[tuple[int, int, plexrl.Sample]]:
                yield from future.samples()
                ended.append(time.monotonic())

            if way == "while_generating":
                found = graded.grade_stream(prompts, SAMPLES, generated())
                assert found.rewards.all()
            else:
                finished = list(generated())
                if way == "together":
                    assert graded.grade_stream(prompts, SAMPLES, finished).rewards.all()
                else:
                    assert all(reward(prompts[i], each).score for i, _, each in finished)
            now = time.monotonic()
            return now - began, (now - ended[0]) / (now - began)

        ways = ("one_by_one", "together", "while_generating")
        step(ways[0], 0)
        rounds = [{way: step(way, seed + 1) for way in ways} for seed in range(ROUNDS)]
    for way in ways:
        yield f"exposed_{way}", statistics.median(each[way][1] for each in rounds)
    for way in ways[1:]:
        ratios = (each[ways[0]][0] / each[way][0] for each in rounds)
        yield f"speedup_{way}", statistics.median(ratios)


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
    report("Rewards of programs in the sandbox", ("figure", "value"), rows, figures)


if __name__ == "__main__":
    main()
