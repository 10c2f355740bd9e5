"""Measures tail batching live: the rollout time of a step with and without it, and the reward.

    python -m benchmarks.rollout_tail [--quick] [--json] [--plot=FILE.png]

All ways run on one embedded cluster with the same workers: one trains, two generate. *Synchronous*
is `job.rollout` with `BoundedStaleness(0)`. *Prompts* is `TailBatching(over_launch_prompts=1.25,
over_launch_responses=1)`, which trains the same samples in another order; *prompts and samples* is
`TailBatching(over_launch=1.25)`, the paper's; both have `fixed_over_launch=True`. *Plain loop* is
`sync_weights` and `generate`, without the rollout service.

Rollout time: seconds for which the trainer waits for a batch, from its request (which begins with
the sync of the weights) until it is there with its rewards, over an epoch but for its first step.
Each way trains every prompt of the epoch once, with as many samples, so what short rounds put off
is in the figure. The learning rate is 0, so a prompt's samples are the same in every way, unless
some are left out; a step uses one prompt of its batch, since its time is in no figure. An untrained
model ends each sample with a probability of about 1/100 per token, up to 480 tokens. The ways take
turns for several epochs, of which the fastest counts, since other work on the machine only adds
time. `longest_*` hardly depends on such work: the tokens of the longest sample of a step, which are
the decode steps that an engine needs at least. `profile_period_s_*` is the length of a step in the
trainer's profile at the end, by which the scheduler plans. The figures `slow_*` are of the same
epochs with rewards that wait 2 s for one prompt in 16, as programs do that reach a time limit: a
long tail that takes nothing from the processors, which all workers share.

Reward: answer with the digits of the prompt in ascending order. The number of digits has a long
tail, so some prompts have long answers. After some supervised steps each way trains on the same
prompts; every few steps the model answers questions that are not trained. `reward_*` is the mean
over these after the last step, and `*_spread` the standard deviation between seeds. `--plot` draws
the curves.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

import plexrl
from benchmarks.report import report
from benchmarks.rollout_live import Task, sorting, train
from benchmarks.sizes import sized
from plexrl.client.blocking.bounded_rollout import BoundedRollout
from plexrl.cluster.embedded.start import start_embedded

INSTANCES = 2
SLOW_S = sized(2.0, quick=0.1)
SLOW_PART = 1 / 16
"""Part of the prompts whose rewards wait `SLOW_S`, in the epochs with slow rewards."""
STEPS = sized(10, quick=3)
"""Of an epoch."""
EPOCHS = sized(5, quick=1)
SEEDS = sized(5, quick=1)
CURVE_STEPS = sized(60, quick=2)
SHOWN_EVERY = sized(10, quick=2)
"""Steps between two points of a curve."""
WARM_UP_STEPS = sized(40, quick=1)
LETTERS = "".join(chr(0x100 + each) for each in range(97))
"""With the special tokens there are 100 tokens, of which one ends a sample."""
ASKED = 64
"""Questions of a point, with 4 answers each."""
POLICIES: dict[str, plexrl.RolloutPolicy | None] = {
    "plain_loop": None,
    "synchronous": plexrl.BoundedStaleness(0),
    "prompts": plexrl.TailBatching(
        over_launch_prompts=1.25, over_launch_responses=1.0, fixed_over_launch=True
    ),
    "prompts_and_samples": plexrl.TailBatching(over_launch=1.25, fixed_over_launch=True),
}
CURVES = ("synchronous", "prompts", "prompts_and_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step trains."""

    prompts: list[list[int]]
    samples: list[list[plexrl.Sample]]
    rewards: npt.NDArray[np.float64]
    """`[prompts, samples]`."""
    waited_s: float
    """How long the trainer has waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One way through all prompts; the first step is left out of the sums."""

    rollout_s: float
    longest: int
    """Tokens of the longest sample of each step, added."""
    tokens: int
    prompts: list[list[int]]
    """All that were trained, sorted."""
    period_s: float | None
    """Of the trainer's profile, by which the scheduler plans; None if it has none yet."""


def plain_loop(
    job: plexrl.Job, actor: plexrl.TrainDeployment, task: Task, steps: int
) -> Iterator[Batch]:
    """The instances are replicas of one deployment."""
    rollout = job.rollout_deployment(
        "rollout",
        task.model,
        parallelism=plexrl.Parallelism(dp=INSTANCES),
    )
    asked = task.asked()
    for step in range(steps):
        began = time.monotonic()
        rollout.sync_weights(actor)
        prompts = list(islice(asked, task.prompts))
        sampling = replace(task.sampling, first_sample=step * task.prompts * task.samples)
        future = rollout.generate(prompts, n=task.samples, sampling=sampling, stream="rows")
        found = task.graded.grade_stream(prompts, task.samples, future.samples())
        samples = future.result().samples
        waited_s = time.monotonic() - began
        yield Batch(prompts=prompts, samples=samples, rewards=found.rewards, waited_s=waited_s)


def made_rollout(
    job: plexrl.Job, actor: plexrl.TrainDeployment, task: Task, policy: plexrl.RolloutPolicy
) -> BoundedRollout:
    """The rollout of a job."""
    return job.rollout(
        "rollout",
        task.model,
        actor,
        instances=INSTANCES,
        policy=policy,
        prompts=task.prompts,
        samples=task.samples,
        sampling=task.sampling,
    )


def service_loop(rollout: BoundedRollout, task: Task, steps: int) -> Iterator[Batch]:
    """As many prompts as the steps need, and no more."""
    prompts = islice(task.asked(), steps * task.prompts)
    began = time.monotonic()
    for batch in rollout.batches(prompts, task.graded, steps=steps):
        waited_s, rewards = time.monotonic() - began, np.array(batch.rewards)
        yield Batch(
            prompts=batch.prompts, samples=batch.samples, rewards=rewards, waited_s=waited_s
        )
        began = time.monotonic()


def skewed(slow_s: float) -> Task:
    """Long-tailed lengths, whatever is learnt. Rewards of some prompts wait `slow_s` seconds."""
    drawn = np.random.default_rng(5)

    def reward(prompt: list[int], sample: plexrl.Sample) -> float:
        if random.Random(str(prompt)).random() < SLOW_PART:
            time.sleep(slow_s)
        return sum(each % 2 for each in sample.tokens) / len(sample.tokens)

    def asked() -> Iterator[list[int]]:
        while True:
            yield drawn.integers(3, 100, 8).tolist()

    return Task(
        model=plexrl.tiny_qwen2(LETTERS),
        prompts=sized(16, quick=4),
        samples=sized(4, quick=2),
        sampling=plexrl.SamplingParams(max_tokens=sized(480, quick=40), seed=7),
        learning_rate=0.0,
        asked=asked,
        reward=reward,
    )


def epoch(cluster: plexrl.Cluster, policy: plexrl.RolloutPolicy | None, slow_s: float) -> Epoch:
    """Train all prompts once. In the first step engines warm up."""
    task = skewed(slow_s)
    with cluster.create_job("benchmark") as job:
        actor = job.train_deployment("actor", task.model)
        rollout = None if policy is None else made_rollout(job, actor, task, policy)
        steps = STEPS + 1
        batches = (
            plain_loop(job, actor, task, steps)
            if rollout is None
            else service_loop(rollout, task, steps)
        )
        found: list[Batch] = []
        for batch in batches:
            train(actor, task, batch.prompts[:1], batch.samples[:1], batch.rewards[:1], 0)
            found.append(batch)
        deployments = job.explain()["deployments"]
        name = actor.deployment
        profile = next(each["profile"] for each in deployments if each["deployment"] == name)
    measured = found[1:]
    lengths = [[len(e.tokens) for row in batch.samples for e in row] for batch in measured]
    return Epoch(
        longest=sum(map(max, lengths)),
        rollout_s=sum(batch.waited_s for batch in measured),
        tokens=sum(map(sum, lengths)),
        prompts=sorted(prompt for batch in found for prompt in batch.prompts),
        period_s=None if profile is None else float(profile["period_s"]),
    )


def rollout_times(
    cluster: plexrl.Cluster,
) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Rows of the table, and figures."""
    epochs: dict[str, list[Epoch]] = {name: [] for name in POLICIES}
    slow: dict[str, list[Epoch]] = {name: [] for name in POLICIES}
    for _ in range(EPOCHS):
        for name, policy in POLICIES.items():
            epochs[name].append(epoch(cluster, policy, 0.0))
            slow[name].append(epoch(cluster, policy, SLOW_S))
    asked = epochs["plain_loop"][0].prompts
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name, runs in epochs.items():
        assert all(each.prompts == asked for each in [*runs, *slow[name]]), "not the same work"
        seconds, speedup = _seconds(epochs, name)
        slow_seconds, slow_speedup = _seconds(slow, name)
        longest = statistics.median(each.longest for each in runs) / STEPS
        figures[f"rollout_s_{name}"] = min(seconds)
        figures[f"speedup_{name}"] = speedup
        figures[f"slow_rollout_s_{name}"] = min(slow_seconds)
        figures[f"slow_speedup_{name}"] = slow_speedup
        figures[f"longest_{name}"] = longest
        periods = [each.period_s for each in runs if each.period_s is not None]
        if periods:
            figures[f"profile_period_s_{name}"] = statistics.median(periods)
        rows.append(
            (
                name.replace("_", " "),
                f"{min(seconds):.2f}-{max(seconds):.2f}",
                f"{speedup:.2f}",
                f"{min(slow_seconds):.2f}",
                f"{slow_speedup:.2f}",
                f"{longest:.0f}",
                f"{statistics.median(each.tokens for each in runs) / STEPS:.0f}",
            )
        )
    return rows, figures


def _seconds(epochs: Mapping[str, Sequence[Epoch]], name: str) -> tuple[list[float], float]:
    """Rollout time of a step in each epoch, and how much faster the fastest one is than the fastest
    synchronous one."""
    seconds = {way: [each.rollout_s / STEPS for each in runs] for way, runs in epochs.items()}
    return seconds[name], min(seconds["synchronous"]) / min(seconds[name])


def digits(seed: int) -> Task:
    """Sort 2 to 12 digits, mostly few."""

    def reward(expected: str, answer: str) -> float:
        right = sum(a == b for a, b in zip(answer, expected, strict=False))
        return right / max(len(answer), len(expected))

    return sorting(
        seed,
        count=lambda rng: 2 + min(int(rng.expovariate(0.5)), 10),
        reward=reward,
        warm_up_steps=WARM_UP_STEPS,
        max_tokens=16,
        learning_rate=3e-4,
    )


def curve(cluster: plexrl.Cluster, policy: plexrl.RolloutPolicy, seed: int) -> list[float]:
    """The mean reward on questions that are not trained, before the first step and after every
    `SHOWN_EVERY` steps."""
    task = digits(seed)
    # The same ones for each seed's policies; `asked` gives those of training first.
    questions = list(islice(digits(seed + 500).asked(), ASKED))
    with cluster.create_job("benchmark") as job:
        actor = job.train_deployment("actor", task.model)
        task.warm_up(actor)
        actor.barrier().result()
        shown = job.rollout_deployment("shown", task.model)

        def answered() -> float:
            shown.sync_weights(actor)
            found = shown.generate(questions, n=4, sampling=task.sampling).result().samples
            rewards = [
                task.reward(question, sample)
                for question, row in zip(questions, found, strict=True)
                for sample in row
            ]
            return statistics.mean(rewards)

        made = [answered()]
        rollout = made_rollout(job, actor, task, policy)
        for step, batch in enumerate(service_loop(rollout, task, CURVE_STEPS), 1):
            train(actor, task, batch.prompts, batch.samples, batch.rewards, 0)
            if step % SHOWN_EVERY == 0:
                made.append(answered())
    return made


def curves(cluster: plexrl.Cluster) -> dict[str, npt.NDArray[np.float64]]:
    """`[seeds, points]` by the name of the policy."""
    found: dict[str, list[list[float]]] = {name: [] for name in CURVES}
    for seed in range(SEEDS):
        for name in CURVES:
            policy = POLICIES[name]
            assert policy is not None
            found[name].append(curve(cluster, policy, seed))
    return {name: np.array(made) for name, made in found.items()}


def plot(found: dict[str, npt.NDArray[np.float64]], path: Path) -> None:
    """The mean over seeds, and the range of one standard deviation around it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, rewards in found.items():
        steps = np.arange(rewards.shape[1]) * SHOWN_EVERY
        mean, spread = rewards.mean(0), rewards.std(0)
        axes.plot(steps, mean, label=f"{name.replace('_', ' ')}, {len(rewards)} seeds")
        axes.fill_between(steps, mean - spread, mean + spread, alpha=0.2)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of other prompts")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run both parts on one embedded cluster."""
    embedded = start_embedded(virtual_gpus=INSTANCES + 2)
    try:
        with plexrl.connect(embedded.url, embedded.api_key) as cluster:
            rows, figures = rollout_times(cluster)
            found = curves(cluster)
    finally:
        embedded.close()
    points: dict[str, tuple[str, ...]] = {}
    for name, rewards in found.items():
        mean, spread = rewards.mean(0), rewards.std(0)
        figures[f"reward_{name}"] = float(mean[-1])
        figures[f"reward_{name}_spread"] = float(spread[-1])
        points[name] = tuple(f"{mean[each]:.2f} ± {spread[each]:.2f}" for each in (0, -1))
    table = [
        (*row, *points.get(name, ("-", "-"))) for name, row in zip(POLICIES, rows, strict=True)
    ]
    columns = (
        *("rollout", "s a step", "speedup", "slow", "speedup"),
        *("longest", "tokens", "reward at first", "at last"),
    )
    report("Rollout time of a step, and reward, with tail batching", columns, table, figures)
    for word in sys.argv:
        if word.startswith("--plot="):
            plot(found, Path(word.removeprefix("--plot=")))


if __name__ == "__main__":
    main()
