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

*idle part* is the part of the first job's time, alone, in which it has no generation queued or
running. *got*
is what the other job drew beside the first, per second, over what it draws alone. *slowdown* is the
first job's time over its time alone. *equal* says whether the first job's trajectories have the
same tokens as alone.
"""

import random
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
TRAJECTORIES, TURNS, ROUNDS = 8, sized(5, quick=2), sized(2, quick=1)
MAX_TOKENS = sized(90, quick=16)
STALL_S = sized((0.5, 2.0), quick=(0.05, 0.1))
ALONE_S = sized(15.0, quick=1.0)
"""How long the other job draws alone."""
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
    for step in range(ROUNDS):
        environments = [Stalling(step * TRAJECTORIES + index) for index in range(TRAJECTORIES)]
        sampling = plexrl.SamplingParams(max_tokens=MAX_TOKENS, seed=step, ignore_eos=True)
        played += roll_out(
            rollout, environments, text, sampling=sampling, turns_max=TURNS, in_step=True
        )
    return played


class Other:
    """A job that always has two generations queued, and counts what it has drawn."""

    def __init__(self, rollout: plexrl.RolloutDeployment) -> None:
        self._rollout = rollout
        self._ends = threading.Event()
        self._drawn: list[tuple[float, int]] = []
        self._threads = [threading.Thread(target=self._draw, args=(seed,)) for seed in (1, 2)]

    def _draw(self, seed: int) -> None:
        while not self._ends.is_set():
            sampling = plexrl.SamplingParams(max_tokens=MAX_TOKENS, seed=seed)
            groups = self._rollout.generate([[3, 4, 5]], n=8, sampling=sampling).result().samples
            count = sum(len(sample.tokens) for group in groups for sample in group)
            self._drawn.append((time.monotonic(), count))
            seed += 2

    @contextmanager
    def draws(self) -> Iterator[None]:
        """It draws in this block."""
        for thread in self._threads:
            thread.start()
        while not self._drawn:
            time.sleep(0.01)
        try:
            yield
        finally:
            self._ends.set()

    def tokens(self, since: float, until: float) -> int:
        """Tokens of generations that ended in this time."""
        return sum(count for at, count in list(self._drawn) if since <= at < until)

    def join(self) -> None:
        """Wait for its last generations."""
        for thread in self._threads:
            thread.join()


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
    first_s = ended - began
    return Pass(
        first_s=first_s,
        idle_part=1.0 - queued_s(job, since) / first_s,
        other_per_s=0.0 if other is None else other.tokens(began, ended) / first_s,
        tokens=[each.tokens for each in played],
    )


def drawn_alone(cluster: plexrl.Cluster) -> float:
    """Tokens per second of the other job alone."""
    job, rollout = create(cluster, "other")
    with job:
        other = Other(rollout)
        with other.draws():
            began = time.monotonic()
            time.sleep(ALONE_S)
            per_s = other.tokens(began, began + ALONE_S) / ALONE_S
        other.join()
    return per_s


def passes(cluster: plexrl.Cluster, *, preemptible: bool) -> tuple[Pass, Pass]:
    """The first job's work alone and beside the other job."""
    first = create(cluster, "first")
    with first[0]:
        play(first[1])  # Its processes start, and its usual pauses become known.
        alone = measure(first)
        job, rollout = create(cluster, "other", preemptible=preemptible)
        with job:
            other = Other(rollout)
            with other.draws():
                shared = measure(first, other)
            other.join()
    return alone, shared


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
            most = drawn_alone(cluster)
            alone, shared = passes(cluster, preemptible=way == "preemptible")
        got, slowdown = shared.other_per_s / most, shared.first_s / alone.first_s
        is_equal = shared.tokens == alone.tokens
        name = way.replace(", ", "_").replace(" ", "_").replace(".", "_")
        figures |= {
            f"{name}_idle_part": alone.idle_part,
            f"{name}_got": got,
            f"{name}_of_idle": got / alone.idle_part,
            f"{name}_slowdown": slowdown,
            f"{name}_equal": float(is_equal),
        }
        parts = (f"{alone.idle_part:.3f}", f"{got:.3f}", f"{got / alone.idle_part:.2f}")
        times = (f"{alone.first_s:.1f}", f"{slowdown:.2f}")
        rows.append((way, *times, *parts, "yes" if is_equal else "NO"))
    columns = ("other job", "alone s", "slowdown", "idle part", "got", "of idle", "equal")
    report("Tool time of one job, used by another", columns, rows, figures)


if __name__ == "__main__":
    main()
