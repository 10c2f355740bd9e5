"""A cluster of any size that exists in the scheduler's journal only.

It has nodes, tenants, jobs that run and jobs that wait, as a scheduler that has just restarted
knows them.
"""

import heapq
import random
from dataclasses import dataclass, field
from pathlib import Path

from plexrl.ids import DeploymentId, JobId, NodeId, OperationId, RouterId, TenantId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.scheduler.live_service import Plain, digest

SETTINGS: Plain = {"policy": "pack", "residents_max": 4, "node_grace_s": 1e6}
"""Settings of the scheduler that the fleet has, and that a scheduler on its journal must have."""
GPUS_OF_A_NODE = 8
GIB = 1 << 30
HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"
"""What a tenant may call a job."""
NAMES = ("math-7b", "code-7b", "agent-32b", "chat-8b", "tools-4b", HOSTILE)
SIZES = (1, 2, 4, 8, 8, 16)
TENANTS = ("ada", "grace", "alan", "edsger")
CYCLE = (OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP)
RUN_S = {OperationKind.FORWARD: 50.0, OperationKind.FORWARD_BACKWARD: 25.0}
SHORT_S = 4.0
"""Seconds of any other operation, and of a move."""
PAUSE_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Sizes of the cluster, and the seconds that it has been at work."""

    nodes: int
    jobs: int
    tenants: int
    span_s: float
    placed_max: int
    """Jobs that run operations, of those that have GPUs."""


BIG = Fleet(nodes=256, jobs=20_000, tenants=40, span_s=900.0, placed_max=1500)
SMALL = Fleet(nodes=6, jobs=30, tenants=4, span_s=7200.0, placed_max=30)


@dataclass(slots=True)
class Workers:
    """Answers the core's commands on a virtual clock."""

    core: SchedulerCore
    now: float
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    heap: list[tuple[float, int, ev.Event]] = field(default_factory=list)
    count: int = 0

    def send(self, event: ev.Event) -> None:
        """Give the core an event, and plan what its commands lead to."""
        for command in self.core.handle(event, self.now):
            match command:
                case cmd.Run():
                    self._run(command)
                case cmd.LaunchWorkers():
                    self._launch(command)
                case cmd.SetTimer():
                    self._plan(max(0.0, command.at - self.now), ev.TimerFired())

    def cycle(self, deployment: str, in_s: float) -> None:
        """Submit the operations of one step."""
        for kind in CYCLE:
            self.count += 1
            self._plan(in_s, _submitted(f"{deployment}:{self.count}", deployment, kind))

    def run_until(self, end: float) -> None:
        """Let everything happen that is due by then."""
        while self.heap and self.heap[0][0] <= end:
            self.now, _, event = heapq.heappop(self.heap)
            self.send(event)
        self.now = end

    def _plan(self, in_s: float, event: ev.Event) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + in_s, self.count, event))

    def _run(self, run: cmd.Run) -> None:
        seconds = RUN_S.get(run.kind, SHORT_S) * self.rng.uniform(0.6, 1.4)
        finished = ev.OperationFinished(
            operation=run.operation, token=run.token, compute_s=0.9 * seconds
        )
        self._plan(seconds, finished)
        if run.kind is CYCLE[-1]:
            self.cycle(run.deployment, seconds + self.rng.uniform(0.3, 1.7) * PAUSE_S)

    def _launch(self, command: cmd.LaunchWorkers) -> None:
        for rank in command.ranks:
            ready = ev.WorkerReady(
                deployment=command.deployment,
                rank=rank.rank,
                incarnation=command.incarnation,
                address="unix:/-",
            )
            self._plan(0.0, ready)


def build(fleet: Fleet, now: float) -> Workers:
    """The fleet as it is at `now`, in seconds since the epoch."""
    fields: Plain = {"listen": ("unix:/-",), "journal": "-", "operator_key_digest": "0"}
    core = SchedulerCore(SchedulerConfig(**fields, **SETTINGS))
    workers = Workers(core, now - fleet.span_s)
    for index in range(fleet.nodes):
        workers.send(_node(index))
    workers.send(ev.RouterJoined(router=RouterId("router0")))
    for index in range(fleet.tenants):
        _make_tenant(workers, index, fleet)
    for index in range(fleet.jobs):
        _submit(workers, index, fleet)
    workers.run_until(workers.now)
    ready = [name for name, each in core.cluster.state.deployments.items() if each.wpg.is_ready]
    for name in ready[: fleet.placed_max]:
        workers.cycle(name, workers.rng.uniform(0.0, PAUSE_S))
    workers.run_until(now - 60.0)
    workers.send(ev.NodeDrainChanged(node=NodeId("node000"), is_draining=True))
    workers.run_until(now)
    return workers


def write_journal(path: Path, core: SchedulerCore, now: float) -> None:
    """A journal with a snapshot of the fleet."""
    journal = SqlJournal(str(path))
    journal.acquire("test", 600.0)
    position = journal.append([(ev.TimerFired(), now)])
    journal.write_snapshot(position, now, core.dump())
    journal.release()
    journal.close()


def tenant_name(index: int) -> str:
    """A tenant's name; its API key is the same."""
    return TENANTS[index] if index < len(TENANTS) else f"team{index:02}"


def _node(index: int) -> ev.NodeJoined:
    return ev.NodeJoined(
        node=NodeId(f"node{index:03}"),
        gpus=GPUS_OF_A_NODE,
        gpu_memory_bytes=80 * GIB,
        host_memory_bytes=4096 * GIB,
        statemanager=f"sm{index}",
        node_type="h200" if index % 3 else "a100",
        block=f"rack{index // 8}",
    )


def _make_tenant(workers: Workers, index: int, fleet: Fleet) -> None:
    name = TenantId(tenant_name(index))
    workers.send(ev.TenantCreated(tenant=name, key_digest=digest(name)))
    configured = ev.TenantConfigured(
        tenant=name,
        weight=float(1 + index % 3),
        jobs_max=None,
        gpus_max=GPUS_OF_A_NODE * fleet.nodes * 2 // 3 if index == 1 else None,
        gpu_seconds_max=None,
    )
    workers.send(configured)


def _submit(workers: Workers, index: int, fleet: Fleet) -> None:
    rng = workers.rng
    job = JobId(f"job-{index:05}")
    submitted = ev.JobSubmitted(
        job=job,
        tenant=TenantId(tenant_name(index % fleet.tenants)),
        name=NAMES[index % len(NAMES)],
        controller_timeout_s=1e9,
        reattach_timeout_s=1e9,
        priority=0,
    )
    workers.send(submitted)
    # Possible until one of these nodes is drained.
    all_of_a_type = GPUS_OF_A_NODE * len(range(0, fleet.nodes, 3))
    is_impossible = index % 97 == 13
    created = ev.DeploymentCreated(
        deployment=DeploymentId(f"{job}/actor"),
        job=job,
        kind="train",
        workers=all_of_a_type if is_impossible else rng.choice(SIZES),
        node_type="a100" if is_impossible else "",
        state_bytes=20 * GIB,
        exclusive=False,
        spec_json="{}",
    )
    workers.send(created)


def _submitted(operation: str, deployment: str, kind: OperationKind) -> ev.OperationSubmitted:
    return ev.OperationSubmitted(
        operation=OperationId(operation),
        deployment=DeploymentId(deployment),
        kind=kind,
        params=None,
        tokens=4096,
    )
