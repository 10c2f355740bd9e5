"""Measures an RL job whose rollouts run ahead of its training, beside the same job step by step.

    python -m benchmarks.rollout_live [--quick] [--json] [--plot=FILE.png]

Both run on one embedded cluster with the same workers: one trains, three generate. *Step by step*
is the usual controller: sync the weights, generate a batch, compute the reward of each sample when
it has ended, train. The others are `job.rollout` with a staleness bound. Batches, prompts, models,
rewards and limits are equal.

Throughput: tokens trained per second. An untrained model ends each sample with a probability of
about 1/65 per token, up to 400 tokens, so the lengths are skewed. The first steps, in which the
pipeline fills, and the last ones, in which it empties, are left out. It is measured twice: with
rewards that are computed at once, and (`waiting`) with rewards that wait 0.3 to 1 s for something
outside of this machine, as a judge or a test server. All parts share the machine's processors, so
the first gain is only what the processors idle step by step.

Reward: the task of examples/asynchronous_digits.py after supervised steps, over several seeds. A
figure `reward_*` is the mean reward of the last five steps; `*_spread` is the standard deviation
between seeds. `--plot` draws the curves.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import plexrl
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl import rewards
from plexrl.cluster.embedded.start import start_embedded

INSTANCES = 3
BOUNDS = sized((0, 1, 2, 3), quick=(1,))
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789="
STEPS = sized(12, quick=2)
"""Measured, between the first and the last ones."""
WAIT_S = (0.3, 1.0)
"""Least and most seconds for which a reward waits."""
CURVE_BOUNDS = sized((1, 3), quick=(1,))
CURVE_STEPS = sized(30, quick=2)
WARM_UP_STEPS = sized(80, quick=1)
SEEDS = sized(5, quick=1)
LAST = 5


Reward = Callable[[list[int], plexrl.Sample], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one job trains."""

    model: plexrl.ModelSpec
    prompts: int
    samples: int
    sampling: plexrl.SamplingParams
    learning_rate: float
    asked: Callable[[], Iterator[list[int]]]
    reward: Reward
    warm_up: Callable[[plexrl.TrainDeployment], None] = lambda _: None

    @property
    def graded(self) -> rewards.Graded[plexrl.Sample]:
        """The reward, for all samples of two batches at once."""
        at_once = 2 * self.prompts * self.samples
        return rewards.Graded(self.reward, on_failure="raise", at_once=at_once)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step has trained."""

    at: float
    """When it ended, in seconds."""
    tokens: int
    reward: float
    age: int
    """Largest staleness of a sample."""


def train(
    actor: plexrl.TrainDeployment,
    task: Task,
    prompts: Sequence[list[int]],
    samples: Sequence[Sequence[plexrl.Sample]],
    found: npt.NDArray[np.float64],
    age: int,
) -> Step:
    """One step on a batch, the same one whatever made the batch."""
    advantages = (found - found.mean(1, keepdims=True)) / (found.std(1, keepdims=True) + 1e-4)
    data = plexrl.Batch.from_samples(prompts, samples, advantages)
    data = data.with_values("prox_logprobs", actor.forward(data).result().logprobs)
    actor.forward_backward(data, plexrl.losses.decoupled_ppo(weight_cap=2.0))
    actor.optim_step(learning_rate=task.learning_rate, grad_clip_norm=1.0).result()
    tokens = sum(len(sample.tokens) for row in samples for sample in row)
    return Step(time.monotonic(), tokens, float(found.mean()), age)


def step_by_step(job: plexrl.Job, task: Task, steps: int) -> list[Step]:
    """The usual controller; the instances are replicas of one deployment."""
    actor = job.train_deployment("actor", task.model)
    task.warm_up(actor)
    rollout = job.rollout_deployment(
        "rollout", task.model, parallelism=plexrl.Parallelism(dp=INSTANCES)
    )
    asked, made = task.asked(), []
    for step in range(steps):
        rollout.sync_weights(actor)
        prompts = [next(asked) for _ in range(task.prompts)]
        first = step * task.prompts * task.samples
        sampling = replace(task.sampling, first_sample=first)
        future = rollout.generate(prompts, n=task.samples, sampling=sampling, stream="rows")
        found = task.graded.grade_stream(prompts, task.samples, future.samples())
        made.append(train(actor, task, prompts, future.result().samples, found.rewards, 0))
    return made


def ahead(job: plexrl.Job, task: Task, steps: int, staleness: int) -> list[Step]:
    """With rollouts up to `staleness` steps ahead."""
    actor = job.train_deployment("actor", task.model)
    task.warm_up(actor)
    actor.barrier().result()
    rollout = job.rollout(
        "rollout",
        task.model,
        actor,
        instances=INSTANCES,
        policy=plexrl.BoundedStaleness(staleness),
        prompts=task.prompts,
        samples=task.samples,
        sampling=task.sampling,
    )
    made = []
    for batch in rollout.batches(task.asked(), task.graded, steps=steps):
        age = batch.version - min(min(row) for row in batch.sample_versions)
        found = np.array(batch.rewards)
        made.append(train(actor, task, batch.prompts, batch.samples, found, age))
    return made


def run(cluster: plexrl.Cluster, task: Task, steps: int, staleness: int | None) -> list[Step]:
    """The steps of one job. `staleness` None: step by step."""
    with cluster.create_job("benchmark") as job:
        if staleness is None:
            return step_by_step(job, task, steps)
        return ahead(job, task, steps, staleness)


def skewed(wait_s: tuple[float, float]) -> Task:
    """Long-tailed lengths, whatever is learnt: the learning rate is 0. A reward waits for a time
    between those of `wait_s`."""
    drawn = np.random.default_rng(5)

    def reward(_: list[int], sample: plexrl.Sample) -> float:
        low, high = wait_s
        share = random.Random(str(sample.tokens)).random()
        time.sleep(low + (high - low) * share)
        return sum(token % 2 for token in sample.tokens) / len(sample.tokens)

    def asked() -> Iterator[list[int]]:
        while True:
            yield drawn.integers(3, 60, 8).tolist()

    return Task(
        model=plexrl.tiny_qwen2(LETTERS, hidden=64, layers=2),
        prompts=sized(16, quick=4),
        samples=sized(4, quick=2),
        sampling=plexrl.SamplingParams(max_tokens=sized(400, quick=40), seed=7),
        learning_rate=0.0,
        asked=asked,
        reward=reward,
    )


def throughput(cluster: plexrl.Cluster) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Rows of the table, and figures."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    edge = max(BOUNDS) + 1
    for staleness in (None, *BOUNDS):
        name = "step_by_step" if staleness is None else f"eta_{staleness}"
        row = ["step by step" if staleness is None else f"ahead, η = {staleness}"]
        age = 0
        for prefix, wait_s in (("", (0.0, 0.0)), ("waiting_", WAIT_S)):
            made = run(cluster, skewed(wait_s), STEPS + 2 * edge, staleness)
            measured = made[edge : edge + STEPS]
            seconds = measured[-1].at - made[edge - 1].at
            speed = sum(step.tokens for step in measured) / seconds
            figures[f"{prefix}tokens_per_s_{name}"] = speed
            gain = speed / figures[f"{prefix}tokens_per_s_step_by_step"]
            if staleness is not None:
                figures[f"{prefix}gain_{name}"] = gain
            row += [f"{seconds / STEPS:.2f} s", f"{gain:.2f}"]
            age = max(age, *(step.age for step in measured))
        rows.append((*row, str(age)))
    return rows, figures


def sorting(
    seed: int,
    *,
    count: Callable[[random.Random], int],
    reward: Callable[[str, str], float],
    warm_up_steps: int,
    max_tokens: int,
    learning_rate: float,
) -> Task:
    """Answer with the digits of the prompt in ascending order. `count` draws their number, and
    `reward` maps the right answer and the given one."""
    tokenizer = plexrl.Tokenizer.from_vocabulary(DIGITS)

    def drawn(seed: int) -> Iterator[str]:
        rng = random.Random(seed)
        while True:
            yield "".join(rng.choice("0123456789") for _ in range(count(rng)))

    def asked() -> Iterator[list[int]]:
        return (tokenizer.encode(f"{each}=") for each in drawn(seed + 1000))

    def graded(prompt: list[int], sample: plexrl.Sample) -> float:
        expected = "".join(sorted(tokenizer.decode(prompt).removesuffix("=")))
        return reward(expected, tokenizer.decode([t for t in sample.tokens if t != plexrl.EOS]))

    def warm_up(actor: plexrl.TrainDeployment) -> None:
        rng = drawn(seed)
        for _ in range(warm_up_steps):
            chosen = [next(rng) for _ in range(64)]
            prompts = [tokenizer.encode(f"{each}=") for each in chosen]
            answers = [[*tokenizer.encode("".join(sorted(each))), plexrl.EOS] for each in chosen]
            batch = plexrl.Batch.from_completions(prompts, answers)
            actor.forward_backward(batch, plexrl.losses.cross_entropy())
            actor.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)

    return Task(
        model=plexrl.tiny_qwen2(DIGITS, seed=seed),
        prompts=16,
        samples=8,
        sampling=plexrl.SamplingParams(max_tokens=max_tokens, seed=seed),
        learning_rate=learning_rate,
        asked=asked,
        reward=graded,
        warm_up=warm_up,
    )


def digits(seed: int) -> Task:
    """Sort four digits."""

    def reward(expected: str, answer: str) -> float:
        if len(answer) != len(expected):
            return 0.0
        right = sum(a == b for a, b in zip(answer, expected, strict=True)) / len(expected)
        return 0.5 * (answer == expected) + 0.5 * right

    return sorting(
        seed,
        count=lambda _: 4,
        reward=reward,
        warm_up_steps=WARM_UP_STEPS,
        max_tokens=6,
        learning_rate=1e-3,
    )


def curves(cluster: plexrl.Cluster) -> dict[str, np.ndarray]:
    """Mean reward of each step, `[seeds, steps]`, by the name of the system."""
    found = {}
    for staleness in (None, *CURVE_BOUNDS):
        name = "step_by_step" if staleness is None else f"eta_{staleness}"
        found[name] = np.array(
            [
                [step.reward for step in run(cluster, digits(seed), CURVE_STEPS, staleness)]
                for seed in range(SEEDS)
            ]
        )
    return found


def plot(found: dict[str, np.ndarray], path: Path) -> None:
    """The mean over seeds, and the range of one standard deviation around it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, curve in found.items():
        steps = np.arange(1, curve.shape[1] + 1)
        mean, spread = curve.mean(0), curve.std(0)
        label = "step by step" if name == "step_by_step" else f"η = {name.removeprefix('eta_')}"
        axes.plot(steps, mean, label=f"{label}, {len(curve)} seeds")
        axes.fill_between(steps, mean - spread, mean + spread, alpha=0.2)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0.0, 1.0)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run both parts on one embedded cluster."""
    embedded = start_embedded(virtual_gpus=INSTANCES + 1)
    try:
        with plexrl.connect(embedded.url, embedded.api_key) as cluster:
            rows, figures = throughput(cluster)
            found = curves(cluster)
    finally:
        embedded.close()
    columns = ("rollouts", "step", "gain", "waiting", "gain", "age", "reward", "over seeds")
    last = {name: means[:, -LAST:].mean(1).tolist() for name, means in found.items()}
    for name, means in last.items():
        figures[f"reward_{name}"] = statistics.mean(means)
        figures[f"reward_{name}_spread"] = statistics.stdev(means) if len(means) > 1 else 0.0
    by_name = dict(zip(("step_by_step", *(f"eta_{each}" for each in BOUNDS)), rows, strict=True))
    table = [
        (
            *row,
            f"{figures[f'reward_{name}']:.3f}" if name in last else "-",
            f"± {figures[f'reward_{name}_spread']:.3f}" if name in last else "-",
        )
        for name, row in by_name.items()
    ]
    report("Rollouts ahead of training, beside training step by step", columns, table, figures)
    for word in sys.argv:
        if word.startswith("--plot="):
            plot(found, Path(word.removeprefix("--plot=")))


if __name__ == "__main__":
    main()
