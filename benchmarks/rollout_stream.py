"""Training on parts of a batch while the rest is generated, and instances freed meanwhile.

    python -m benchmarks.rollout_stream [--quick] [--json]

Parts: one job on a cluster of its own trains equal prompts by whole batches, in parts of a quarter
of the prompts, and in parts of a quarter of the tokens; the latter and whole batches also with the
next batch generated meanwhile (a staleness of 1). Rewards wait 0.3 to 1 s for something outside of
this machine, as a judge or a test server. The ways take turns; the step times are medians without
the first step of each run. A gain is the step time with whole batches, relative.

Freed instances: on one embedded cluster with three GPUs, job A trains with two rollout instances
that lend their GPUs, and job B makes training steps on the GPU of one of them all the time. Job A
trains equal prompts in two ways, in turns: by whole batches, and in parts with instances that are
freed (Flexes Alg. 1).

`freed_share` is the part of the instances' time in which they were freed, while job A ran;
`other_gain` the steps that job B made in a second beside the second way, relative to the first;
`step_gain` the same of job A's own steps. All workers share the processors of this machine, unlike
GPUs: what job B computes more is taken from job A.

An untrained model ends each sample with a probability of about 1/300 per token, up to 480 tokens.
"""

import random
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

import plexrl
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl import rewards
from plexrl.client.blocking.bounded_rollout import BoundedRollout, RolloutBatch
from plexrl.cluster.embedded.start import start_embedded

STEPS = sized(8, quick=2)
"""Of one run."""
RUNS = sized(3, quick=1)
"""Of each way, in turns."""
PROMPTS, SAMPLES, INSTANCES = 16, 4, 2
MODEL = plexrl.tiny_qwen2("".join(map(chr, range(0x4E00, 0x4E00 + 300))), hidden=32, layers=1)
SAMPLING = plexrl.SamplingParams(max_tokens=480, seed=7)
PART_TOKENS = PROMPTS * SAMPLES * SAMPLING.max_tokens // 8
"""About a quarter of a batch, whose samples have half of the most tokens in the mean."""
WAIT_S = (0.3, 1.0)
"""Least and most seconds for which a reward waits."""
PAUSE_S = 0.3
"""Between two steps of job B."""
LOOK_S = 0.1
"""Interval at which it is looked whether an instance is freed."""


@dataclass(slots=True)
class Found:
    """What one way gave, by run."""

    step_s: list[float] = field(default_factory=list)
    """Seconds of a step of job A."""
    other_rate: list[float] = field(default_factory=list)
    """Steps of job B in a second."""
    freed: list[float] = field(default_factory=list)
    """Part of the instances' time in which they were freed."""


class Other(threading.Thread):
    """Job B: it makes steps until it is stopped."""

    def __init__(self, actor: plexrl.TrainDeployment) -> None:
        super().__init__(daemon=True)
        self._actor = actor
        self._stopped = threading.Event()
        self.steps = 0

    def run(self) -> None:
        rng = np.random.default_rng(1)
        rows = [rng.integers(3, 300, 64).tolist() for _ in range(8)]
        batch = plexrl.Batch(rows, {"mask": [[1.0] * 64] * 8})
        while not self._stopped.is_set():
            self._actor.forward_backward(batch, plexrl.losses.cross_entropy())
            self._actor.optim_step(learning_rate=1e-3).result(600)
            self.steps += 1
            # Its own rollout: without a pause, its burst would go on.
            time.sleep(PAUSE_S)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class Watch(threading.Thread):
    """Looks how many instances are freed."""

    def __init__(self, rollout: BoundedRollout) -> None:
        super().__init__(daemon=True)
        self._rollout = rollout
        self._stopped = threading.Event()
        self.shares: list[float] = []

    def run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            states = [each["state"] for each in self._rollout.status()["instances"].values()]
            self.shares.append(states.count("freed") / len(states))

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        return statistics.mean(self.shares) if self.shares else 0.0


def prompts() -> Iterator[list[int]]:
    rng = np.random.default_rng(3)
    while True:
        yield rng.integers(3, 300, rng.integers(2, 8)).tolist()


def reward(_: list[int], sample: plexrl.Sample) -> float:
    return sum(token % 2 for token in sample.tokens) / len(sample.tokens)


def add_gradients(actor: plexrl.TrainDeployment, part: RolloutBatch) -> int:
    rewards = np.array(part.rewards)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    data = plexrl.Batch.from_samples(part.prompts, part.samples, advantages)
    actor.forward_backward(data, plexrl.losses.grpo(reduction="sequence_sum"))
    return len(data)


def measure(cluster: plexrl.Cluster, found: Found, *, streams: bool) -> None:
    """One run of both jobs."""
    with cluster.create_job("a") as job, cluster.create_job("b") as beside:
        actor = job.train_deployment("actor", MODEL, exclusive=True)
        rollout = job.rollout(
            "rollout",
            MODEL,
            actor,
            instances=INSTANCES,
            policy=plexrl.TailBatching(eta=1, scale_down=streams),
            prompts=PROMPTS,
            samples=SAMPLES,
            sampling=SAMPLING,
            shares_gpus=True,
        )
        # All GPUs have an owner: it borrows one.
        other, watch = Other(beside.train_deployment("actor", MODEL)), Watch(rollout)
        rows, count = islice(prompts(), STEPS * PROMPTS), 0
        if streams:
            parts = rollout.parts(rows, reward, steps=STEPS, prompts_min=PROMPTS // 4)
        else:
            parts = rollout.batches(rows, reward, steps=STEPS)
        other.start()
        watch.start()
        began, before = time.perf_counter(), other.steps
        for part in parts:
            count += add_gradients(actor, part)
            if part.is_last:
                actor.optim_step(learning_rate=1e-4, divide_by=count)
                count = 0
        actor.barrier().result()
        seconds = time.perf_counter() - began
        found.step_s.append(seconds / STEPS)
        found.other_rate.append((other.steps - before) / seconds)
        found.freed.append(watch.stop())
        other.stop()


@dataclass(frozen=True, slots=True)
class Way:
    """How a job takes its batches."""

    name: str
    title: str
    staleness: int
    sizes: dict[str, int] | None
    """Arguments of `parts`; None: whole batches."""


WAYS = (
    Way("whole", "whole batches", 0, None),
    Way("prompts", "parts by prompts", 0, {"prompts_min": PROMPTS // 4}),
    Way("tokens", "parts by tokens", 0, {"tokens_min": PART_TOKENS}),
    Way("whole_ahead", "whole batches, one step ahead", 1, None),
    Way("tokens_ahead", "parts by tokens, one step ahead", 1, {"tokens_min": PART_TOKENS}),
)


def slow_reward(prompt: list[int], sample: plexrl.Sample) -> float:
    low, high = WAIT_S
    time.sleep(low + (high - low) * random.Random(str(sample.tokens)).random())
    return reward(prompt, sample)


def step_times(cluster: plexrl.Cluster, way: Way) -> tuple[list[float], float]:
    """Seconds of each step after the first one, and parts in a step."""
    graded = rewards.Graded(slow_reward, on_failure="raise", at_once=2 * PROMPTS * SAMPLES)
    ended: list[float] = []
    with cluster.create_job("parts") as job:
        actor = job.train_deployment("actor", MODEL)
        rollout = job.rollout(
            "rollout",
            MODEL,
            actor,
            instances=INSTANCES,
            policy=plexrl.BoundedStaleness(way.staleness),
            prompts=PROMPTS,
            samples=SAMPLES,
            sampling=SAMPLING,
        )
        rows, parts, count = prompts(), 0, 0
        taken = (
            rollout.batches(rows, graded, steps=STEPS + 1)
            if way.sizes is None
            else rollout.parts(rows, graded, steps=STEPS + 1, **way.sizes)
        )
        for part in taken:
            parts += 1
            count += add_gradients(actor, part)
            if part.is_last:
                actor.optim_step(learning_rate=1e-4, divide_by=count).result()
                ended.append(time.perf_counter())
                count = 0
    return [after - before for before, after in pairwise(ended)], parts / (STEPS + 1)


def measure_parts(rows: list[tuple[str, ...]], figures: dict[str, float]) -> None:
    """All ways in turns."""
    found: dict[str, list[float]] = {way.name: [] for way in WAYS}
    counts: dict[str, list[float]] = {way.name: [] for way in WAYS}
    running = start_embedded(virtual_gpus=1 + INSTANCES)
    try:
        with plexrl.connect(running.url, running.api_key) as cluster:
            for _ in range(RUNS):
                for way in WAYS:
                    times, count = step_times(cluster, way)
                    found[way.name] += times
                    counts[way.name].append(count)
    finally:
        running.close()
    whole_s = statistics.median(found["whole"])
    for way in WAYS:
        step_s = statistics.median(found[way.name])
        count = statistics.mean(counts[way.name])
        figures |= {f"{way.name}_step_s": step_s, f"{way.name}_gain": whole_s / step_s}
        times_of = (f"{step_s:.2f}", f"{whole_s / step_s:.2f}", f"{count:.1f}")
        rows.append((way.title, *times_of, "-", "-"))


def main() -> None:
    """Both parts."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    measure_parts(rows, figures)
    measure_freed(rows, figures)
    columns = ("job", "s/step", "gain", "parts in a step", "steps/s of B", "freed")
    report("Parts of a batch, and freed instances", columns, rows, figures)


def measure_freed(rows: list[tuple[str, ...]], figures: dict[str, float]) -> None:
    """Both ways in turns."""
    whole, streamed = Found(), Found()
    running = start_embedded(virtual_gpus=1 + INSTANCES)
    try:
        with plexrl.connect(running.url, running.api_key) as cluster:
            for _ in range(RUNS):
                measure(cluster, whole, streams=False)
                measure(cluster, streamed, streams=True)
    finally:
        running.close()
    mean = statistics.mean
    rows += [
        (
            name,
            f"{mean(each.step_s):.2f}",
            f"{mean(whole.step_s) / mean(each.step_s):.2f}",
            "-",
            f"{mean(each.other_rate):.2f}",
            f"{mean(each.freed):.2f}",
        )
        for name, each in (("A: whole batches", whole), ("A: parts, instances freed", streamed))
    ]
    figures |= {
        "freed_share": mean(streamed.freed),
        "other_gain": mean(streamed.other_rate) / mean(whole.other_rate),
        "step_gain": mean(whole.step_s) / mean(streamed.step_s),
    }


if __name__ == "__main__":
    main()
