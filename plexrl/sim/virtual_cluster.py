"""A few jobs of a profile on a virtual cluster, cycle by cycle: what an ordering or a placement
costs each of them.

Operations take as long as their job's profile says. Chance is in the drawn cycles only, which come
from a seeded generator. (A whole trace is `plexrl.sim.engine.simulate`'s.)

A job is a serial loop: roll out (on GPUs of its own), `forward`, `forward_backward` and
`optim_step` together, `sync_weights`, whose publish is the last of the group's work in a cycle.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from plexrl.ids import DeploymentId, JobId, NodeId, OperationId, TenantId
from plexrl.scheduler import SchedulerConfig, SchedulerCore
from plexrl.scheduler.dispatch.switch_cost import HOST
from plexrl.scheduler.state import commands as cmd
from plexrl.scheduler.state import events as ev
from plexrl.scheduler.state.demand import DemandTrace
from plexrl.sim.engine.shell import (
    FOREVER_S,
    VirtualShell,
    arrivals,
    log_to,
    readiness,
    virtual_config,
)
from plexrl.sim.profiles import Cycle, JobProfile
from plexrl.sim.slowdown import CycleRecord, JobReport, RunReport
from plexrl.wire.operations import OperationKind

BACKWARD_SHARE = 0.95
"""Of an update's seconds; the optimizer step has the rest."""

PROFILER_SAMPLE = 8
"""Cycles from one reading of the core's waiting part to the next: it spans the newest 8, so that
readings share none."""

TRAIN, ROLLOUT = "train", "rollout"
"""Node types, so that no rollout takes a train group's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """One job of a run."""

    name: str
    profile: JobProfile
    start_s: float = 0.0
    cycles: int = 100
    """Cycles that count. The job goes on until every job has done its own, so that nobody's last
    cycles have the group to themselves."""
    warm_up: int = 0
    """Cycles before those."""
    trace: DemandTrace | None = None
    """Declared at submission; absent: the scheduler has to profile the job."""


@dataclass(slots=True)
class _Job:
    """A job under way."""

    plan: JobPlan
    random: Random
    cycle: Cycle | None = None
    began_at: float = 0.0
    done: int = 0
    records: list[CycleRecord] = field(default_factory=list)
    profiled: list[float] = field(default_factory=list)
    """Readings of the core's waiting part."""

    @property
    def actor(self) -> DeploymentId:
        return DeploymentId(f"{self.plan.name}/actor")

    @property
    def rollout(self) -> DeploymentId:
        return DeploymentId(f"{self.plan.name}/rollout")

    @property
    def is_complete(self) -> bool:
        return len(self.records) >= self.plan.cycles


class VirtualCluster:
    """Runs jobs to their end: `VirtualCluster(plans, seed=1).run()`.

    There are GPUs for `groups` train groups of one GPU each, and for everybody's rollout.

    The same plans, seed and ordering give the same log, byte for byte; and a job's drawn cycles
    depend on the seed and its name only, so that rules can be compared cycle by cycle.
    """

    def __init__(
        self,
        plans: list[JobPlan],
        *,
        seed: int,
        config: SchedulerConfig | None = None,
        groups: int = 1,
        keep_log: bool = False,
    ) -> None:
        self._groups = groups
        self._shell = VirtualShell(
            config or virtual_config(),
            {
                cmd.RunOperation: self._run_operation,
                cmd.LaunchWorkers: self._launch_workers,
                cmd.MigrateState: self._migrate_state,
            },
        )
        self._jobs = {JobId(plan.name): _Job(plan, Random(f"{seed}:{plan.name}")) for plan in plans}
        self._log: list[bytes] = []
        if keep_log:
            self._shell.watch(log_to(self._log))
        self._answers: dict[OperationId, Callable[[], None]] = {}
        self.submitted = 0
        self.finished = 0

    @property
    def core(self) -> SchedulerCore:
        """The core that decides."""
        return self._shell.core

    @property
    def events(self) -> int:
        """Told to the core."""
        return self._shell.events

    @property
    def log(self) -> bytes:
        """Every event and command, one JSON line each; empty unless it was asked for."""
        return b"\n".join(self._log)

    @property
    def _now(self) -> float:
        return self._shell.now

    def _send(self, event: ev.Event) -> None:
        self._shell.send(event)

    def explained(self, name: str) -> dict[str, Any]:
        """What the core says of that job's train deployment."""
        job = self._jobs[JobId(name)]
        told = self.core.explain_job(JobId(name), self._now)
        found: dict[str, Any] = next(
            each for each in told["deployments"] if each["deployment"] == job.actor
        )
        return found

    def run(self) -> RunReport:
        """Run until every job has done its cycles.

        Raises:
            RuntimeError: nothing more can happen, and some have not.
        """
        self._join("rollout", ROLLOUT, gpus=len(self._jobs))
        for number in range(self._groups):
            self._join(f"train{number}", TRAIN, gpus=1)
        self._shell.connect_router()
        for job in self._jobs.values():
            self._shell.at(job.plan.start_s, self._start, job)
        while not all(job.is_complete for job in self._jobs.values()):
            if not self._shell.run(1):
                stuck = [str(name) for name, job in self._jobs.items() if not job.is_complete]
                raise RuntimeError(
                    f"at {self._now:g} s nothing more can happen, and these jobs are not complete: "
                    f"{', '.join(stuck)}: see `explained` for what each waits for"
                )
        return self._report()

    def _join(self, name: str, node_type: str, gpus: int) -> None:
        self._send(
            ev.NodeJoined(
                node=NodeId(name),
                gpus=gpus,
                gpu_memory_bytes=1 << 40,
                host_memory_bytes=1 << 50,
                statemanager=f"{name}/statemanager",
                node_type=node_type,
            )
        )

    # Commands

    def _run_operation(self, command: cmd.RunOperation) -> None:
        took_s = self._duration_s(command)
        self._shell.at(self._now + took_s, self._finish, (command, took_s))

    def _launch_workers(self, command: cmd.LaunchWorkers) -> None:
        self._shell.at(self._now, self._send_all, readiness(command))

    def _migrate_state(self, command: cmd.MigrateState) -> None:
        self._shell.at(self._now, self._send_all, arrivals(command))

    def _send_all(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self._send(event)

    def _finish(self, run: tuple[cmd.RunOperation, float]) -> None:
        command, took_s = run
        moved = None
        if command.kind in (OperationKind.LOAD, OperationKind.OFFLOAD):
            state_bytes = self._jobs[command.job].plan.profile.state_bytes
            moved = ev.StateMoved(bytes_moved=state_bytes, tier=HOST)
        self._send(
            ev.OperationFinished(
                operation=command.operation, token=command.token, compute_s=took_s, moved=moved
            )
        )
        answer = self._answers.pop(command.operation, None)
        if answer is not None:
            self.finished += 1
            answer()

    def _duration_s(self, command: cmd.RunOperation) -> float:
        job = self._jobs[command.job]
        profile, cycle = job.plan.profile, job.cycle
        if command.deployment != job.actor:
            return 0.0
        match command.kind:
            case OperationKind.LOAD:
                return profile.load_s
            case OperationKind.OFFLOAD | OperationKind.SNAPSHOT:
                return profile.offload_s
        assert cycle is not None, f"{command.operation} runs outside a cycle"
        match command.kind:
            case OperationKind.FORWARD:
                return cycle.log_prob_s
            case OperationKind.FORWARD_BACKWARD:
                return cycle.update_s * BACKWARD_SHARE
            case OperationKind.OPTIM_STEP:
                return cycle.update_s * (1.0 - BACKWARD_SHARE)
            case OperationKind.PUBLISH:
                return cycle.sync_s
            case _:
                raise AssertionError(f"no cycle has a {command.kind}")

    # The controllers: one serial loop a job.

    def _start(self, job: _Job) -> None:
        name = JobId(job.plan.name)
        self._send(
            ev.JobSubmitted(
                job=name,
                tenant=TenantId("tenant"),
                name=job.plan.name,
                controller_timeout_s=FOREVER_S,
                reattach_timeout_s=FOREVER_S,
            )
        )
        for deployment, kind in ((job.actor, "train"), (job.rollout, "rollout")):
            self._send(
                ev.DeploymentCreated(
                    deployment=deployment,
                    job=name,
                    kind=kind,
                    workers=1,
                    state_bytes=job.plan.profile.state_bytes,
                    exclusive=False,
                    spec_json="{}",
                    node_type=TRAIN if kind == "train" else ROLLOUT,
                    trace=job.plan.trace if kind == "train" else None,
                )
            )
        self._begin_cycle(job)

    def _begin_cycle(self, job: _Job) -> None:
        job.cycle = job.plan.profile.draw(job.random)
        job.began_at = self._now
        self._shell.at(self._now + job.cycle.rollout_s, self._log_prob, job)

    def _log_prob(self, job: _Job) -> None:
        self._submit(job, OperationKind.FORWARD, lambda: self._later(job, self._update))

    def _update(self, job: _Job) -> None:
        self._submit(job, OperationKind.FORWARD_BACKWARD, lambda: None)
        self._submit(job, OperationKind.OPTIM_STEP, lambda: self._later(job, self._sync))

    def _sync(self, job: _Job) -> None:
        self._submit(job, OperationKind.SYNC_WEIGHTS, lambda: self._later(job, self._end_cycle))

    def _end_cycle(self, job: _Job) -> None:
        assert job.cycle is not None, "a cycle ends that never began"
        alone_s = job.plan.profile.alone_s(job.cycle)
        job.done += 1
        if job.done > job.plan.warm_up and not job.is_complete:
            job.records.append(
                CycleRecord(
                    began_at=job.began_at,
                    cycle_s=self._now - job.began_at,
                    alone_s=alone_s,
                    group_s=job.cycle.group_s,
                )
            )
            if len(job.records) % PROFILER_SAMPLE == 0:
                self._read_profiler(job)
        self._begin_cycle(job)

    def _read_profiler(self, job: _Job) -> None:
        actor = self.explained(job.plan.name)
        if actor["waiting_part"] is not None:
            job.profiled.append(actor["waiting_part"])

    def _later(self, job: _Job, step: Callable[[_Job], None]) -> None:
        self._shell.at(self._now + job.plan.profile.controller_s, step, job)

    def _submit(self, job: _Job, kind: OperationKind, answer: Callable[[], None]) -> None:
        assert job.cycle is not None, "an operation outside a cycle"
        is_sync = kind == OperationKind.SYNC_WEIGHTS
        self.submitted += 1
        name = OperationId(f"{job.plan.name}:{self.submitted}")
        self._answers[name] = answer
        self._send(
            ev.OperationSubmitted(
                operation=name,
                deployment=job.rollout if is_sync else job.actor,
                kind=kind,
                params_json="{}",
                tokens=0 if is_sync else job.cycle.tokens,
                source=job.actor if is_sync else None,
            )
        )

    def _report(self) -> RunReport:
        switches = int(self.core.status(self._now)["context_switches"])
        return RunReport(
            jobs=tuple(
                JobReport(job=str(name), cycles=tuple(job.records), profiled=tuple(job.profiled))
                for name, job in self._jobs.items()
            ),
            switches=switches,
            ended_at=self._now,
        )
