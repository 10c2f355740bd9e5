"""The jobs of a trace on a virtual cluster: they come, run their cycles and go.

The scheduler's own core decides everything. What is here submits jobs as their time comes, carries
commands out, and says how long that takes. Nothing is kept of a job that has ended.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from plexrl.errors import (
    CapacityError,
    InvalidRequestError,
    ModelDoesNotFitError,
    UnavailableError,
    UnknownJobError,
)
from plexrl.ids import NodeId, OperationId, TenantId
from plexrl.scheduler.state import commands as cmd
from plexrl.scheduler.state import events as ev
from plexrl.sim.checks.checks import Checker
from plexrl.sim.engine.controllers import Controllers
from plexrl.sim.engine.fault_injector import Breakdowns
from plexrl.sim.engine.job_run import AloneClock, JobRun, demand_of
from plexrl.sim.engine.shell import FOREVER_S, VirtualShell, virtual_config, worker_ready_events
from plexrl.sim.metrics.collector import Collector, RunKind
from plexrl.sim.metrics.group_members import GroupMembers
from plexrl.sim.metrics.job_rows import JobRow, JobRows
from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.state.device_state import device_state_bytes
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.state.statemanagers import NodeStates, Refusal
from plexrl.sim.workload.cycles import CycleLaw, Laws
from plexrl.sim.workload.policies import sim_policy
from plexrl.sim.workload.scenario import Scenario
from plexrl.traces import TraceJob
from plexrl.wire.operations import OperationKind

_OFFLOAD: Final = OperationKind.OFFLOAD

REMEMBERED = {"history": 64, "ended_jobs": 64, "profiles": 1}
"""By the core, of what is over: nobody asks for operations and jobs, and no two jobs of a run have
the same name, so that none begins with another's profile."""

PRIORITY_MAX = 100
"""Of the core; a trace's may be higher."""

MOVES: dict[OperationKind, RunKind] = {
    OperationKind.LOAD: "load",
    OperationKind.OFFLOAD: "offload",
    OperationKind.SNAPSHOT: "offload",
}
"""Kinds that are the scheduler's own, and what a measure calls them."""


CycleEnded = Callable[[str, float, float], None]
"""Receives each cycle that ends: its job in the trace, its seconds including all waiting, and its
seconds on a group of the job's own."""


class TraceRun:
    """One run. The shell's clock is driven from outside."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        settings: Mapping[str, Any] | None = None,
        laws: Laws = CycleLaw,
        costs: MoveCosts | None = None,
        on_cycle: CycleEnded | None = None,
        on_job: Callable[[JobRow], None] | None = None,
    ) -> None:
        """`settings`: scheduler settings that replace the policy's."""
        self.scenario = scenario
        policy = sim_policy(scenario.policy)
        config = virtual_config(**{**REMEMBERED, **policy.settings, **(settings or {})})
        self.shell = VirtualShell(
            config,
            {
                cmd.RunOperation: self._run_operation,
                cmd.LaunchWorkers: self._launch_workers,
                cmd.StopWorkers: self._stop_workers,
                cmd.ReleaseState: self._release_state,
                cmd.MigrateState: self._migrate_state,
                cmd.PrefetchState: self._prefetch_state,
            },
        )
        self._collector = Collector(scenario, None if on_job is None else JobRows(on_job))
        self._checker = Checker(scenario, self.shell.core) if scenario.check else None
        if self._checker is not None:
            self.shell.watch(self._checker.watch)
        self._control_s = scenario.control_s
        self._laws = laws
        self._on_cycle = on_cycle
        self._costs = costs or MoveCosts(scenario.pools, scenario.switch_s)
        self._config = config
        self._source: Iterator[TraceJob] = scenario.source.jobs()
        self._runs: dict[str, JobRun] = {}
        """Live jobs, by deployment, which is named as its job is."""
        self._groups = GroupMembers(self._collector)
        self._node_types = {
            f"p{index}n{number}": pool.node_type
            for index, pool in enumerate(scenario.pools)
            for number in range(pool.nodes)
        }
        self._types = {pool.node_type.name: pool.node_type for pool in scenario.pools}
        self._has_one_speed = len({kind.speed for kind in self._types.values()}) == 1
        """Otherwise what a cycle takes depends on where each of its operations ran."""
        self._tenants: set[str] = set()
        self._states = NodeStates(self.shell, self._costs, self._node_types, self._tell)
        self._breakdowns = Breakdowns(
            self.shell,
            scenario,
            [NodeId(name) for name in self._node_types],
            lose_node=self.lose_node,
            return_node=self.return_node,
            lose_worker=self.lose_worker,
        )
        self._controllers = Controllers(
            self.shell,
            self._runs,
            self._tell,
            controller_s=scenario.behaviour.controller_s,
            cycle_over=self._cycle_over,
            job_over=self._job_over,
        )
        self._in_doubt: list[JobRun] = []
        """Jobs whose workers the core has stopped: did they end, or move?"""
        self._is_last_seen = False
        self.jobs_seen = 0
        self.jobs_done = 0
        self._switches = 0
        self._failures = 0

    # From outside

    def start(self) -> None:
        """Have the cluster there, and the first job come."""
        self.shell.connect_router()
        for node in self._node_types:
            self._join_node(NodeId(node))
        self._breakdowns.start()
        self._expect_next_job(None)

    def check_it_ended(self) -> None:
        """Raises `UnavailableError` where jobs are left and nothing more can happen, and
        `InvariantError` where the checked laws say that something is left."""
        if not self._runs:
            if self._checker is not None:
                self._checker.finish(self.shell.now)
                self._states.check()
            return
        waiting = [run.trace.job_id for run in self._runs.values()]
        raise UnavailableError(
            f"at {self.shell.now:g} s nothing more can happen, and {len(waiting)} jobs are not "
            f"complete, as {', '.join(waiting[:5])}: give the cluster nodes that they fit on"
        )

    def result(self, speed: Speed) -> SimResult:
        """What it came to."""
        return self._collector.result(
            self.shell.now, self.shell.events, self._switches, self._failures, speed
        )

    def lose_node(self, node: NodeId, survives: bool = True) -> None:
        """A node is gone, with the processes on it; what it had in host memory `survives`, or it
        does not."""
        self._states.node_lost(node, survives)
        self._failed()
        self._tell(ev.NodeLost(node=node))

    def return_node(self, node: NodeId) -> None:
        """A lost node is back, with what has survived."""
        self._join_node(node)

    def lose_worker(self, deployment: str, rank: int = 0) -> None:
        """A worker process is dead, if the deployment has any."""
        run = self._runs.get(deployment)
        if run is None or not run.incarnation:
            return
        self._failed()
        exited = ev.WorkerExited(
            deployment=run.deployment, rank=rank, incarnation=run.incarnation, reason="failure"
        )
        self._tell(exited)

    def _failed(self) -> None:
        self._failures += 1
        self._collector.failed(self.shell.now)

    # The cluster

    def _join_node(self, node: NodeId) -> None:
        kind = self._node_types[node]
        pool, number = node[1:].split("n")
        per_block = self.scenario.pools[int(pool)].nodes_per_block
        self._tell(
            ev.NodeJoined(
                node=node,
                gpus=kind.gpus,
                gpu_memory_bytes=kind.gpu_memory_bytes,
                host_memory_bytes=kind.host_memory_bytes,
                statemanager=node,
                node_type=kind.name,
                block=f"p{pool}b{int(number) // per_block}",
                nvme_bytes=kind.nvme_bytes,
                states=self._states.node_back(node),
            )
        )

    def _tell(self, event: ev.Event) -> None:
        """Tell the core, and see whose workers it has stopped for good."""
        self.shell.send(event)
        while self._in_doubt:
            self._look_at(self._in_doubt.pop())

    def _look_at(self, run: JobRun) -> None:
        if run.deployment not in self._runs:
            return
        try:
            view = self.shell.core.job_view(run.job, self.shell.now)
        except UnknownJobError:
            self._give_up(run)
            return
        if view["state"] in ("FAILED", "CANCELLED"):
            self._give_up(run)
            return
        group = self.shell.core.deployment_view(run.deployment, self.shell.now)["group"]
        self._groups.put(run, group or "", self.shell.now)

    def _give_up(self, run: JobRun) -> None:
        if self._checker is not None:
            self._checker.given_up(run.job)
        self._end(run, "failed")

    # Jobs come and go

    def _expect_next_job(self, _: None) -> None:
        job = next(self._source, None)
        if job is not None:
            self.shell.at(max(job.submit_s, self.shell.now), self._submit_job, job)
        elif not self._runs:
            self.shell.is_over = True
        self._is_last_seen = job is None

    def _submit_job(self, job: TraceJob) -> None:
        self.jobs_seen += 1
        scenario, shell = self.scenario, self.shell
        behaviour = scenario.behaviour
        kind = self._types.get(job.node_type, scenario.pools[0].node_type)
        state_bytes = device_state_bytes(job, kind)
        run = JobRun(
            job,
            f"j{self.jobs_seen}",
            self._laws(job, behaviour, scenario.seed, detail=scenario.detail),
            staleness=job.staleness if behaviour.staleness is None else behaviour.staleness,
            state_bytes=state_bytes,
        )
        self._runs[run.deployment] = run
        self._collector.job_submitted(job, shell.now)
        self._breakdowns.job_submitted(run.deployment, job.job_id)
        tenant = TenantId(job.tenant or "-")
        if tenant not in self._tenants:
            self._tenants.add(tenant)
            self._tell(ev.TenantCreated(tenant=tenant, key_digest=tenant, is_operator=True))
        self._tell(
            ev.JobSubmitted(
                job=run.job,
                tenant=tenant,
                name=run.job,
                controller_timeout_s=FOREVER_S,
                reattach_timeout_s=FOREVER_S,
                priority=max(-PRIORITY_MAX, min(PRIORITY_MAX, job.priority)),
            )
        )
        created = ev.DeploymentCreated(
            deployment=run.deployment,
            job=run.job,
            kind="train",
            workers=job.gpus,
            state_bytes=state_bytes,
            exclusive=False,
            spec_json="{}",
            node_type=job.node_type if job.node_type in self._types else "",
            trace=demand_of(job, behaviour) if scenario.warm else None,
        )
        try:
            self._tell(created)
        except (CapacityError, ModelDoesNotFitError, InvalidRequestError):
            # Larger than the cluster, or than its memory: the core has said so, and it is over.
            self._finish(run, "failed")
        self._expect_next_job(None)

    def _cycle_over(self, run: JobRun) -> None:
        now, job_id = self.shell.now, run.job_id
        before_s = run.worked_s
        alone_s = run.end_cycle()
        if self._checker is not None and self._has_one_speed:
            self._checker.drawn(run.job, run.worked_s - before_s)
        took_s = now - run.cycle_began_at
        run.cycle_began_at = now
        self._collector.cycle_ended(job_id, now, took_s, alone_s)
        if self._on_cycle is not None:
            self._on_cycle(job_id, took_s, alone_s)

    def _job_over(self, run: JobRun) -> None:
        self._finish(run, "completed")

    def _finish(self, run: JobRun, outcome: str) -> None:
        self._tell(ev.JobFinished(job=run.job, outcome=outcome))
        self._end(run, outcome)

    def _end(self, run: JobRun, outcome: str) -> None:
        """Forget the job."""
        if self._runs.pop(run.deployment, None) is None:
            return
        run.run = None
        self._states.forget(run.deployment)
        self._breakdowns.job_ended(run.deployment)
        self._groups.put(run, "", self.shell.now)
        self.jobs_done += 1
        alone_s = 0.0 if run.alone is None else run.alone.now
        self._collector.job_ended(
            run.trace.job_id,
            self.shell.now,
            run.trained,
            outcome,
            alone_s,
            run.gpus * run.worked_s,
        )
        if self._is_last_seen and not self._runs:
            self.shell.is_over = True

    # Commands

    def _launch_workers(self, command: cmd.LaunchWorkers) -> None:
        run = self._runs.get(command.deployment)
        if run is None:
            return
        self._groups.put(run, command.group, self.shell.now)
        nodes = tuple(dict.fromkeys(str(rank.node) for rank in command.ranks))
        self._collector.nodes_taken(command.group, nodes, self.shell.now)
        self._states.launched(command, run.state_bytes)
        run.incarnation = command.incarnation
        kind = self._node_types[command.ranks[0].node]
        run.node_type, run.speed = kind.name, kind.speed
        if run.placed_at is None:
            run.placed_at = run.cycle_began_at = self.shell.now
            run.alone = self._alone(run)
            self._collector.job_placed(run.trace.job_id, self.shell.now)
        self.shell.at(self.shell.now + self.scenario.launch_s, self._launched, command)

    def _alone(self, run: JobRun) -> AloneClock:
        where = (run.node_type, run.state_bytes, run.gpus)
        return AloneClock(
            staleness=run.staleness,
            controller_s=self.scenario.behaviour.controller_s,
            launch_s=self.scenario.launch_s,
            load_s=self._costs.load_s(*where, "host"),
            snapshot_s=self._costs.offload_s(*where, "host"),
            snapshots_after=self._config.snapshot_operations,
            snapshots_after_s=self._config.snapshot_work_s,
        )

    def _launched(self, command: cmd.LaunchWorkers) -> None:
        run = self._runs.get(command.deployment)
        if run is None or run.incarnation != command.incarnation:
            return
        for rank, event in zip(command.ranks, worker_ready_events(command), strict=True):
            if not self._states.is_away(rank.node):
                self._tell(event)
        self._controllers.start(run)

    def _stop_workers(self, command: cmd.StopWorkers) -> None:
        run = self._runs.get(command.deployment)
        if run is not None:
            if run.run is not None:
                self._tell_of_run(run, run.run)
            self._in_doubt.append(run)

    def _release_state(self, command: cmd.ReleaseState) -> None:
        self._states.release(command)
        run = self._runs.get(command.deployment)
        if run is not None:
            self._in_doubt.append(run)

    def _migrate_state(self, command: cmd.MigrateState) -> None:
        self._states.migrate(command)

    def _prefetch_state(self, command: cmd.PrefetchState) -> None:
        self._states.prefetch(command)

    def _run_operation(self, command: cmd.RunOperation) -> None:
        run = self._runs[command.deployment]
        kind = MOVES.get(command.kind, "run")
        if kind != "run":
            move = self._states.begin(command)
            run.move = move
            took_s = move.took_s
        elif command.operation == run.operation:
            took_s = run.steps[run.step].work_s / run.speed
        else:
            # Done before, and lost with its workers.
            took_s = run.step_named(command.operation).work_s / run.speed
        shell = self.shell
        now = shell.now
        run.run = command
        run.run_kind = kind
        run.run_began_at = now
        run.run_s = took_s
        shell.at(now + took_s, self._ran, command)

    def _ran(self, command: cmd.RunOperation) -> None:
        run = self._runs.get(command.deployment)
        if run is None or run.run is not command:
            # Cut off: its workers were lost.
            return
        kind = run.run_kind
        self._tell_of_run(run, command)
        computed_s = run.run_s - self._control_s
        if computed_s < 0.0:
            computed_s = 0.0
        operation = command.operation
        if kind != "run":
            self._moved(run, command, operation, computed_s)
            return
        self._tell(ev.OperationFinished(operation, command.token, computed_s))
        if operation == run.operation:
            self._controllers.answered(run)

    def _moved(
        self, run: JobRun, command: cmd.RunOperation, operation: OperationId, computed_s: float
    ) -> None:
        move = run.move
        assert move is not None, f"{operation} ends that never began"
        if isinstance(move, Refusal):
            self._tell(move.answer(command))
            return
        if run.run_kind == "offload" and command.kind == _OFFLOAD:
            self._switches += 1
            self._collector.switched(run.job_id)
        moved, token = move.moved, command.token
        self._tell(ev.OperationFinished(operation, token, computed_s, None, "{}", moved))
        for report in move.reports:
            self._tell(report)

    def _tell_of_run(self, run: JobRun, command: cmd.RunOperation) -> None:
        """It is over, or was cut off."""
        run.run = None
        began_at, now = run.run_began_at, self.shell.now
        self._collector.ran(command.group, run.job_id, run.gpus, run.run_kind, began_at, now)
