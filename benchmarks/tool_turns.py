"""How much of a job's tool time another job gets, and what that costs the first.

    python benchmarks/tool_turns.py [--quick] [--json]

One GPU, two jobs. The first plays eight trajectories of several turns in step, and its tools take
0.5 to 2 s; it stalls while they run. The other always has work. Both engines are paced (a
14B model on an A40, five times as fast, over a link of 1 TB/s), so that other load of this machine
counts little; a switch takes about 0.3 s. Three ways for the other job to use the GPU:

* *preemptible*: it gets idle time only;
* *member, 0.5 s bursts* and *2 s bursts*: it shares the GPU in turns with the first, as any job
  does, and `burst_max_s` is 0.5 or 2 s. By default a job that always has work queued keeps the GPU
  for 20 times what an interruption costs whenever the first stalls: too long to measure here.

The first job alone, the other job alone and both take turns in one run, so that a change of the
machine's load meets all three; the figures are medians over these rounds. *idle part* is the part
of the first job's time, beside the other, in which it has no generation queued or running. *got* is
what the other job drew in that time, per second, over what it draws alone: the part of the GPU's
time that it was given. *of idle* is the one over the other. *slowdown* is the first job's time over
its time alone. *equal* says whether the tokens of the first job are the same in all passes.
"""

import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import plexrl
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.environments import PlainText, Step, Trajectory, roll_out

VOCABULARY = "0123456789:"
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=1)
PACE = "a40:qwen2.5-14b@0.2,link=1e12"
TRAJECTORIES, TURNS, STEPS = 8, sized(5, quick=2), sized(2, quick=1)
ROUNDS = sized(5, quick=2)
"""How often the two jobs run alone and beside each other."""
MAX_TOKENS = sized(90, quick=16)
STALL_S = sized((0.5, 2.0), quick=(0.05, 0.1))
ALONE_S = sized(15.0, quick=1.0)
"""How long the other job draws alone in a round."""
WAYS = {"preemptible": 300.0, "member, 0.5 s bursts": 0.5, "member, 2 s bursts": 2.0}
"""`burst_max_s` of each way."""


@dataclass
class Stalling:
    """An environment whose steps take a time that its seed decides."""

    seed: int
    stops: tuple[str, ...] = ()
    _turn: int = field(default=0, init=False)

    def reset(self) -> str:
        return f"{self.seed}:"

    def step(self, reply: str) -> Step:
        self._turn += 1
        time.sleep(random.Random(f"{self.seed}/{self._turn}").uniform(*STALL_S))
        return Step(observation=f":{len(reply) % 10}:", done=self._turn == TURNS)


def play(rollout: plexrl.RolloutDeployment) -> list[Trajectory]:
    """The first job's work."""
    text = PlainText(plexrl.Tokenizer.from_vocabulary(VOCABULARY))
    played = []
    for step in range(STEPS):
        environments = [Stalling(step * TRAJECTORIES + index) for index in range(TRAJECTORIES)]
        sampling = plexrl.SamplingParams(max_tokens=MAX_TOKENS, seed=step, ignore_eos=True)
        played += roll_out(
            rollout, environments, text, sampling=sampling, turns_max=TURNS, in_step=True
        )
    return played


class Other:
    """A job that always has two generations queued while it draws, and counts their tokens."""

    def __init__(self, rollout: plexrl.RolloutDeployment) -> None:
        self._rollout = rollout
        self._ends = threading.Event()
        self._drawn: list[tuple[float, int]] = []
        self._seeds = itertools.count(1)

    def _draw(self) -> None:
        while not self._ends.is_set():
            sampling = plexrl.SamplingParams(max_tokens=MAX_TOKENS, seed=next(self._seeds))
            groups = self._rollout.generate([[3, 4, 5]], n=8, sampling=sampling).result().samples
            count = sum(len(sample.tokens) for group in groups for sample in group)
            self._drawn.append((time.monotonic(), count))

    @contextmanager
    def draws(self) -> Iterator[None]:
        """It draws in this block, which begins when its first generation has ended."""
        self._ends.clear()
        self._drawn.clear()
        threads = [threading.Thread(target=self._draw) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not self._drawn:
            time.sleep(0.01)
        try:
            yield
        finally:
            self._ends.set()
            for thread in threads:
                thread.join()

    def per_s(self, since: float, until: float) -> float:
        """Tokens per second of generations that ended in this time."""
        count = sum(count for at, count in list(self._drawn) if since <= at < until)
        return count / (until - since)

    def alone(self) -> float:
        """Tokens per second while the first job does nothing."""
        with self.draws():
            began = time.monotonic()
            time.sleep(ALONE_S)
            return self.per_s(began, time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of the first job's work."""

    first_s: float
    idle_part: float
    """Part of the time in which none of its generations ran or waited to run."""
    other_per_s: float
    """Tokens per second of the other job meanwhile; 0 without one."""
    tokens: list[list[int]]


Rollout = tuple[plexrl.Job, plexrl.RolloutDeployment]


def create(cluster: plexrl.Cluster, name: str, *, preemptible: bool = False) -> Rollout:
    """A job with one rollout."""
    job = cluster.create_job(name)
    shares = None if preemptible else True
    rollout = job.rollout_deployment(
        "draw", MODEL, pace=PACE, shares_gpus=shares, preemptible=preemptible
    )
    return job, rollout


def queued_s(job: plexrl.Job, since: int) -> float:
    """Seconds in which a generation of the job waited or ran, after this entry of its log."""
    total, end = 0.0, 0.0
    for each in job.operations(after=since):
        if each["kind"] == "generate" and each["finished_at"] is not None:
            begin, finish = each["submitted_at"], each["finished_at"]
            total += max(0.0, finish - max(begin, end))
            end = max(end, finish)
    return total


def measure(first: Rollout, other: Other | None = None) -> Pass:
    """The first job's work, with or without the other job beside it."""
    job, rollout = first
    since = max((each["index"] for each in job.operations()), default=0)
    began = time.monotonic()
    played = play(rollout)
    ended = time.monotonic()
    return Pass(
        first_s=ended - began,
        idle_part=1.0 - queued_s(job, since) / (ended - began),
        other_per_s=0.0 if other is None else other.per_s(began, ended),
        tokens=[each.tokens for each in played],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Each job alone, and both."""

    alone: Pass
    other_alone_per_s: float
    shared: Pass

    @property
    def slowdown(self) -> float:
        """The first job's time beside the other over its time alone."""
        return self.shared.first_s / self.alone.first_s

    @property
    def got(self) -> float:
        """The part of its rate alone that the other job has beside the first."""
        return self.shared.other_per_s / self.other_alone_per_s


def rounds(cluster: plexrl.Cluster, *, preemptible: bool) -> Iterator[Round]:
    """Rounds of one way to share."""
    first, (job, rollout) = (
        create(cluster, "first"),
        create(cluster, "other", preemptible=preemptible),
    )
    with first[0], job:
        other = Other(rollout)
        # Their processes start, and the first job's usual pauses become known.
        play(first[1])
        with other.draws():
            play(first[1])
        for _ in range(ROUNDS):
            alone, most = measure(first), other.alone()
            with other.draws():
                shared = measure(first, other)
            yield Round(alone=alone, other_alone_per_s=most, shared=shared)


@contextmanager
def one_gpu(burst_max_s: float) -> Iterator[plexrl.Cluster]:
    """A cluster with one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "cluster.toml"
        config.write_text(f"[scheduler]\nburst_max_s = {burst_max_s}\n")
        data = Path(folder) / "data"
        words = ["up", "--config", config, "--data-dir", data, "--virtual-gpus", "1", "--gpus", "0"]
        command = [sys.executable, "-m", "plexrl.cli.app", *map(str, words), "--policy", "pack"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
            assert up.stdout is not None
            up.stdout.readline()
            try:
                with plexrl.connect(data_dir=data) as cluster:
                    yield cluster
            finally:
                up.terminate()


def main() -> None:
    """Run and print the benchmark."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for way, burst_max_s in WAYS.items():
        with one_gpu(burst_max_s) as cluster:
            found = list(rounds(cluster, preemptible=way == "preemptible"))
        idle = statistics.median(each.shared.idle_part for each in found)
        got = statistics.median(each.got for each in found)
        of_idle = statistics.median(each.got / each.shared.idle_part for each in found)
        slowdown = statistics.median(each.slowdown for each in found)
        alone_s = statistics.median(each.alone.first_s for each in found)
        passes = [run for each in found for run in (each.alone, each.shared)]
        is_equal = all(each.tokens == passes[0].tokens for each in passes)
        name = way.replace(", ", "_").replace(" ", "_").replace(".", "_")
        figures |= {
            f"{name}_idle_part": idle,
            f"{name}_got": got,
            f"{name}_of_idle": of_idle,
            f"{name}_slowdown": slowdown,
            f"{name}_equal": float(is_equal),
        }
        times = (f"{alone_s:.1f}", f"{slowdown:.2f}")
        parts = (f"{idle:.3f}", f"{got:.3f}", f"{of_idle:.2f}")
        rows.append((way, *times, *parts, "yes" if is_equal else "NO"))
    columns = ("other job", "alone s", "slowdown", "idle part", "got", "of idle", "equal")
    report("Tool time of one job, used by another", columns, rows, figures)


if __name__ == "__main__":
    main()
