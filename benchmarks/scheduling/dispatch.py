"""(c) Events through the core at 1 000 groups of 8 resident jobs, beside a scan of all groups."""

import heapq
import random
import time
from dataclasses import dataclass, field

from benchmarks.report import percentile
from benchmarks.scheduling.cluster import config
from benchmarks.sizes import sized
from plexrl.process.garbage_collection import freeze_existing_objects
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind

GROUPS = sized(1000, quick=8)
RESIDENTS = 8
EVENTS = sized(300_000, quick=2000)
WARM_UP = sized(20_000, quick=200)
"""Events that are not counted."""
CYCLE = (OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP)
RUN_S = 3.0
MOVE_S = 1.0
PAUSE_S = 60.0


@dataclass(slots=True)
class Drive:
    """Answers a core's commands with events on a virtual clock, and times the core alone."""

    core: SchedulerCore
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    now: float = 0.0
    heap: list[tuple[float, int, ev.Event]] = field(default_factory=list)
    pushed: int = 0
    operations: int = 0
    samples: list[float] = field(default_factory=list)
    commands: int = 0

    def send(self, event: ev.Event) -> None:
        """Give the core an event, and plan what its commands lead to."""
        began = time.perf_counter()
        commands = self.core.handle(event, self.now)
        self.samples.append(time.perf_counter() - began)
        self.commands += len(commands)
        for command in commands:
            if isinstance(command, cmd.Run):
                moves = (OperationKind.LOAD, OperationKind.OFFLOAD, OperationKind.SNAPSHOT)
                seconds = (MOVE_S if command.kind in moves else RUN_S) * self.rng.uniform(0.7, 1.3)
                done = ev.OperationFinished(
                    operation=command.operation, token=command.token, compute_s=seconds
                )
                self.plan(seconds, done)
                if command.kind == CYCLE[-1]:
                    self.plan_cycle(
                        command.deployment, seconds + self.rng.uniform(0.5, 1.5) * PAUSE_S
                    )
            elif isinstance(command, cmd.LaunchWorkers):
                for rank in command.ranks:
                    ready = ev.WorkerReady(
                        deployment=command.deployment,
                        rank=rank.rank,
                        incarnation=command.incarnation,
                        address="a",
                    )
                    self.plan(0.0, ready)
            elif isinstance(command, cmd.SetTimer):
                self.plan(max(0.0, command.at - self.now), ev.TimerFired())

    def plan(self, in_s: float, event: ev.Event) -> None:
        """Have `event` happen later."""
        self.pushed += 1
        heapq.heappush(self.heap, (self.now + in_s, self.pushed, event))

    def plan_cycle(self, deployment: str, in_s: float) -> None:
        """Have a job submit its next cycle's operations."""
        for kind in CYCLE:
            self.operations += 1
            submitted = ev.OperationSubmitted(
                operation=f"{deployment}:{self.operations}",  # type: ignore[arg-type]
                deployment=deployment,  # type: ignore[arg-type]
                kind=kind,
                params=None,
                tokens=4096,
            )
            self.plan(in_s, submitted)

    def run(self, events: int) -> None:
        """Let that many events happen."""
        for _ in range(events):
            self.now, _, event = heapq.heappop(self.heap)
            self.send(event)


def full_cluster(groups: int, residents: int) -> Drive:
    """A core whose groups, of one GPU each, all have their residents, ready to run."""
    drive = Drive(SchedulerCore(config(policy="pack", residents_max=residents, history=10_000)))
    for index in range(groups // 8):
        drive.send(
            ev.NodeJoined(
                node=f"n{index}",  # type: ignore[arg-type]
                gpus=8,
                gpu_memory_bytes=80 << 30,
                host_memory_bytes=2048 << 30,
                statemanager="sm",
            )
        )
    drive.send(ev.RouterJoined(router="r"))  # type: ignore[arg-type]
    for index in range(groups * residents):
        submit_job(drive, index)
    drive.run(len(drive.heap))
    for index in range(groups * residents):
        drive.plan_cycle(f"j{index}/actor", drive.rng.uniform(0, PAUSE_S))
    return drive


def submit_job(drive: Drive, index: int) -> None:
    """A job with one train deployment of one GPU."""
    drive.send(
        ev.JobSubmitted(
            job=f"j{index}",  # type: ignore[arg-type]
            tenant="t",  # type: ignore[arg-type]
            name="job",
            controller_timeout_s=1e9,
            reattach_timeout_s=1e9,
        )
    )
    drive.send(
        ev.DeploymentCreated(
            deployment=f"j{index}/actor",  # type: ignore[arg-type]
            job=f"j{index}",  # type: ignore[arg-type]
            kind="train",
            workers=1,
            state_bytes=8 << 30,
            exclusive=False,
            spec_json="{}",
        )
    )


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    drive = full_cluster(GROUPS, RESIDENTS)
    drive.run(WARM_UP)
    freeze_existing_objects()
    drive.samples.clear()
    drive.commands = 0
    drive.run(EVENTS)
    total_s = sum(drive.samples)
    rate, p99 = EVENTS / total_s, percentile(drive.samples, 99) * 1e6
    naive = _naive_rate(GROUPS)
    figures = {
        "dispatch_per_s": rate,
        "dispatch_p50_us": percentile(drive.samples, 50) * 1e6,
        "dispatch_p99_us": p99,
        "dispatch_commands_per_event": drive.commands / EVENTS,
        "dispatch_naive_ratio": rate / naive,
    }
    label = f"events to commands, {GROUPS} groups x {RESIDENTS}"
    per_s = f"{rate:,.0f}/s"
    return [(label, per_s, f"p99 {p99:.0f} us", f"{rate / naive:,.0f}x")], figures


def _naive_rate(groups: int) -> float:
    """Events per second of a dispatcher that looks at every group after every event."""
    waiting = [[(float(job), 10.0 + job) for job in range(RESIDENTS)] for _ in range(groups)]
    began, rounds = time.perf_counter(), 20
    for now in range(rounds):
        for members in waiting:
            max(members, key=lambda each: (now - each[0] + each[1]) / each[1])
    return rounds / (time.perf_counter() - began)
