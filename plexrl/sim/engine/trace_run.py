"""Runs the jobs of a trace on a virtual cluster.

The scheduler's own core makes all decisions. `TraceRun` submits jobs at their times, executes the
core's commands and computes their durations. It keeps no state of ended jobs.
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
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.arrival import deployments, new_run, submission
from plexrl.sim.engine.checks.checker import Checker
from plexrl.sim.engine.controllers.controllers import Controllers
from plexrl.sim.engine.controllers.fillers import Fillers
from plexrl.sim.engine.faults.fault_injector import FaultInjector
from plexrl.sim.engine.shell import (
    CommandHandler,
    VirtualShell,
    ignore,
    virtual_config,
    worker_ready_events,
)
from plexrl.sim.engine.statemanagers import NodeStates, Refusal
from plexrl.sim.metrics.collector import Collector, RunKind
from plexrl.sim.metrics.group_members import GroupMembers
from plexrl.sim.metrics.job_rows import JobRow
from plexrl.sim.metrics.kept_gpus import KeptGpus
from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.cycles import CycleDistribution, CycleFactory
from plexrl.sim.workload.job_run import (
    JobRun,
    RolloutWorkers,
    Workers,
    demand_of,
    rollout_demand_of,
)
from plexrl.sim.workload.policies import sim_policy
from plexrl.sim.workload.scenario import NodeType, Scenario
from plexrl.sim.workload.source.survey import WRONG_PRIORITY, is_priority
from plexrl.traces import TraceJob
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind

_OFFLOAD: Final = OperationKind.OFFLOAD

RETENTION = {"history": 64, "ended_jobs": 64, "profiles": 1}
"""Small limits on what the core keeps of the past. No job of a run reuses the name of another, so
old profiles are of no use."""

MOVES: dict[OperationKind, RunKind] = {
    OperationKind.LOAD: "load",
    OperationKind.OFFLOAD: "offload",
    OperationKind.SNAPSHOT: "offload",
}
"""Run kind of the scheduler's own operations."""

CycleEnded = Callable[[str, float, float], None]
"""Receives each cycle that ends: its job in the trace, its seconds including all waiting, and its
seconds on a group of the job's own, moves of its state included."""


class TraceRun:
    """One run. The caller advances the shell's clock."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        settings: Mapping[str, Any] | None = None,
        cycle_factory: CycleFactory = CycleDistribution,
        costs: MoveCosts | None = None,
        on_cycle: CycleEnded | None = None,
        on_job: Callable[[JobRow], None] | None = None,
    ) -> None:
        """`settings`: scheduler settings that replace the policy's."""
        self.scenario = scenario
        policy = sim_policy(scenario.policy)
        names = ("load_max", "starvation_bound_s", "longest_first", "mixed_sizes")
        given = {name: value for name in names if (value := getattr(scenario, name)) is not None}
        config = virtual_config(**{**RETENTION, **policy.settings, **given, **(settings or {})})
        handlers = self._handlers()
        if scenario.fills_valleys:
            handlers = {kind: self._routed(each) for kind, each in handlers.items()}
        self.shell = VirtualShell(config, handlers)
        kept = KeptGpus(self.shell.core)
        self.shell.observe(kept.observe)
        self._collector = Collector(scenario, on_job, kept)
        self._checker = Checker(scenario, self.shell.core) if scenario.check else None
        if self._checker is not None:
            self.shell.observe(self._checker.observe)
        self._control_s = scenario.control_s
        self._cycle_factory = cycle_factory
        self._on_cycle = on_cycle
        self._costs = costs or MoveCosts(scenario.pools, scenario.switch_s)
        self._config = config
        self._source: Iterator[TraceJob] = scenario.source.jobs()
        self._runs: dict[str, JobRun] = {}
        """Live jobs by the deployment that trains; it has the name of its job."""
        self._rollouts: dict[str, RolloutWorkers] = {}
        """Rollout deployments of live jobs."""
        self._groups = GroupMembers(self._collector)
        self._node_types = _node_types(scenario)
        self._types = {pool.node_type.name: pool.node_type for pool in scenario.pools}
        self._has_one_speed = len({kind.speed for kind in self._types.values()}) == 1
        """Otherwise a cycle's duration depends on the nodes of each of its operations."""
        self._tenants: set[str] = set()
        self._states = NodeStates(self.shell, self._costs, self._node_types, self._send)
        self._faults = FaultInjector(
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
            self._send,
            controller_s=scenario.behaviour.controller_s,
            cycle_over=self._cycle_over,
            job_over=self._job_over,
        )
        self._fillers = Fillers(
            self.shell, self._states, self._collector, self._groups, self._send, scenario
        )
        self._stopped: list[Workers] = []
        """Deployments whose workers the core has stopped: they either end or move."""
        self._is_last_seen = False
        self.jobs_seen = 0
        self.jobs_done = 0
        self._switches = 0

    def _handlers(self) -> dict[type[cmd.Command], CommandHandler]:
        return {
            **dict.fromkeys(cmd.RUNS, self._run_operation),
            cmd.LaunchWorkers: self._launch_workers,
            cmd.StopWorkers: self._stop_workers,
            cmd.ReleaseState: self._release_state,
            cmd.MigrateState: self._migrate_state,
            cmd.PrefetchState: self._prefetch_state,
            cmd.AbortOperation: ignore,
        }

    def _routed(self, handler: CommandHandler) -> CommandHandler:
        """The handler of commands that are not for a filler."""

        def handle(command: cmd.Command) -> None:
            if not self._fillers.handle(command):
                handler(command)

        return handle

    # API

    def start(self) -> None:
        """Join all nodes and schedule the first job."""
        self.shell.connect_router()
        for node in self._node_types:
            self._join_node(NodeId(node))
        self._faults.start()
        self._schedule_next_job(None)

    def add_tenant(self, tenant: TenantId, settings: ev.TenantConfigured | None = None) -> None:
        """Create a tenant, with these quotas, unless it is known."""
        if tenant in self._tenants:
            return
        self._tenants.add(tenant)
        self._send(ev.TenantCreated(tenant=tenant, key_digest=tenant, is_operator=True))
        if settings is not None:
            self._send(settings)

    def check_it_ended(self) -> None:
        """Check that the run is complete.

        Raises:
            UnavailableError: jobs are left and no event is pending.
            InvariantError: an invariant of a completed run is broken.
        """
        if not self._runs:
            self._fillers.end()
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
        """The result of the run."""
        return self._collector.result(self.shell.now, self.shell.events, self._switches, speed)

    def lose_node(self, node: NodeId, survives: bool = True) -> None:
        """Remove a node and its processes; `survives`: the contents of its host memory remain."""
        self._states.node_lost(node, survives)
        self._collector.failed()
        self._send(ev.NodeLost(node=node))

    def return_node(self, node: NodeId) -> None:
        """Rejoin a lost node, with the states that survived."""
        self._join_node(node)

    def lose_worker(self, deployment: str, rank: int = 0) -> None:
        """End a worker process, if the deployment has any."""
        run = self._runs.get(deployment)
        if run is None or not run.incarnation:
            return
        self._collector.failed()
        exited = ev.WorkerExited(
            deployment=run.deployment, rank=rank, incarnation=run.incarnation, reason="failure"
        )
        self._send(exited)

    # The cluster

    def _join_node(self, node: NodeId) -> None:
        kind = self._node_types[node]
        pool, number = node[1:].split("n")
        per_block = self.scenario.pools[int(pool)].nodes_per_block
        self._send(
            ev.NodeJoined(
                node=node,
                gpus=kind.gpus,
                gpu_memory_bytes=kind.gpu_memory_bytes,
                host_memory_bytes=kind.host_memory_bytes,
                statemanager=node,
                node_type=kind.name,
                speed=kind.speed,
                block=f"p{pool}b{int(number) // per_block}",
                nvme_bytes=kind.nvme_bytes,
                states=self._states.node_back(node),
            )
        )

    def _send(self, event: ev.Event) -> None:
        """Pass an event to the core, then update the jobs whose workers the core has stopped."""
        self.shell.send(event)
        while self._stopped:
            self._update_placement(self._stopped.pop())

    def _update_placement(self, run: Workers) -> None:
        job = run.owner
        if job.deployment not in self._runs:
            return
        try:
            view = self.shell.core.job_view(job.job, self.shell.now)
        except UnknownJobError:
            self._fail(job)
            return
        if view["state"] in ("FAILED", "CANCELLED"):
            self._fail(job)
            return
        found = self.shell.core.deployment_view(run.deployment, self.shell.now)
        if found["group"] is None:
            self._leave(run)
            return
        self._put(run, found["group"], tuple((str(r["node"]), r["gpu"]) for r in found["ranks"]))

    def _put(self, run: Workers, group: str, gpus: tuple[tuple[str, int], ...]) -> None:
        self._groups.put(run, group, gpus, self.shell.now)
        self._collector.nodes_taken(run.deployment, tuple(dict(gpus)), self.shell.now)

    def _leave(self, run: Workers) -> None:
        self._groups.remove(run, self.shell.now)
        self._collector.nodes_taken(run.deployment, (), self.shell.now)

    def _fail(self, run: JobRun) -> None:
        if self._checker is not None:
            self._checker.job_failed(run.job)
        self._end(run, "failed")

    # Jobs

    def _schedule_next_job(self, _: None) -> None:
        job = next(self._source, None)
        if job is not None:
            self.shell.at(max(job.submit_s, self.shell.now), self._submit_job, job)
        elif not self._runs:
            self.shell.is_over = True
        self._is_last_seen = job is None

    def _submit_job(self, job: TraceJob) -> None:
        if not is_priority(job):
            raise InvalidRequestError(
                f"cannot simulate job {job.job_id} (at {job.priority}) {WRONG_PRIORITY}"
            )
        self.jobs_seen += 1
        scenario, shell, behaviour = self.scenario, self.shell, self.scenario.behaviour
        kind = self._types.get(job.node_type, scenario.pools[0].node_type)
        run = new_run(job, f"j{self.jobs_seen}", kind, scenario, self._cycle_factory)
        self._runs[run.deployment] = run
        if run.rollouts is not None:
            self._rollouts[run.rollouts.deployment] = run.rollouts
        self._collector.job_submitted(job, shell.now)
        self._faults.job_submitted(run.deployment, job.job_id)
        self.add_tenant(tenant := TenantId(job.tenant or "-"))
        self._send(submission(run, tenant, scenario.slo))
        node_type = job.node_type if job.node_type in self._types else ""
        demand = demand_of(job, behaviour) if scenario.warm else None
        rolls_out = rollout_demand_of(job, behaviour) if scenario.warm else None
        made = deployments(run, node_type, demand, rolls_out, placed=scenario.rollouts)
        try:
            for created in made:
                self._send(created)
        except (CapacityError, ModelDoesNotFitError, InvalidRequestError):
            # The job is larger than the cluster or its memory.
            self._finish(run, "failed")
        self._schedule_next_job(None)

    def _cycle_over(self, run: JobRun) -> None:
        now, job_id = self.shell.now, run.job_id
        before_s, rolled_before_s = run.worked_s, run.rolled_s
        alone_s, least_s = run.end_cycle()
        if self._checker is not None and self._has_one_speed:
            rolled_s = 0.0 if run.rollouts is None else run.rolled_s - rolled_before_s
            self._checker.drawn(run.job, run.worked_s - before_s + rolled_s)
        took_s = now - run.cycle_began_at
        run.cycle_began_at = now
        self._collector.cycle_ended(job_id, took_s, least_s, took_s - alone_s)
        if self._on_cycle is not None:
            self._on_cycle(job_id, took_s, alone_s)

    def _job_over(self, run: JobRun) -> None:
        self._finish(run, "completed")

    def _finish(self, run: JobRun, outcome: str) -> None:
        self._send(ev.JobFinished(job=run.job, outcome=outcome))
        self._end(run, outcome)

    def _end(self, run: JobRun, outcome: str) -> None:
        """Remove the job and report it to the collector."""
        if self._runs.pop(run.deployment, None) is None:
            return
        run.run = None
        self._states.forget(run.deployment)
        self._faults.job_ended(run.deployment)
        self._leave(run)
        worked_gpu_s = run.gpus * run.worked_s
        if run.rollouts is not None:
            del self._rollouts[run.rollouts.deployment]
            self._states.forget(run.rollouts.deployment)
            self._leave(run.rollouts)
            worked_gpu_s += run.rollouts.gpus * run.rolled_s
            run.rollouts = None
        self.jobs_done += 1
        alone_s = 0.0 if run.least is None else run.least.now
        self._collector.job_ended(
            run.trace.job_id,
            self.shell.now,
            outcome,
            alone_s,
            worked_gpu_s,
        )
        if self._is_last_seen and not self._runs:
            self.shell.is_over = True

    # Commands

    def _workers(self, deployment: str) -> Workers | None:
        """The workers of a live job's deployment."""
        return self._runs.get(deployment) or self._rollouts.get(deployment)

    def _launch_workers(self, command: cmd.LaunchWorkers) -> None:
        run = self._workers(command.deployment)
        if run is None:
            return
        self._put(run, command.group, tuple((str(r.node), r.gpu) for r in command.ranks))
        self._states.launched(command, run.state_bytes)
        run.incarnation = command.incarnation
        if isinstance(run, JobRun):
            self._placed(run, self._node_types[command.ranks[0].node])
            if self.scenario.fills_valleys:
                self._fillers.group_joined(run)
        self.shell.at(self.shell.now + self.scenario.launch_s, self._launched, command)

    def _placed(self, run: JobRun, kind: NodeType) -> None:
        run.node_type, run.speed = kind.name, kind.speed
        # Before its first placement a job has run at no speed.
        run.speed_max = max(run.speed_max, run.speed) if run.placed_at is not None else run.speed
        if run.placed_at is None:
            run.placed_at = run.cycle_began_at = self.shell.now
            run.start_clocks(self.scenario, self._costs, self._config)
            self._collector.job_placed(run.trace.job_id, self.shell.now)

    def _launched(self, command: cmd.LaunchWorkers) -> None:
        run = self._workers(command.deployment)
        if run is None or run.incarnation != command.incarnation:
            return
        for rank, event in zip(command.ranks, worker_ready_events(command), strict=True):
            if not self._states.is_away(rank.node):
                self._send(event)
        if isinstance(run, JobRun):
            self._controllers.start(run)

    def _stop_workers(self, command: cmd.StopWorkers) -> None:
        run = self._workers(command.deployment)
        if run is not None:
            if run.run is not None:
                self._record_run(run, run.run)
            self._stopped.append(run)

    def _release_state(self, command: cmd.ReleaseState) -> None:
        self._states.release(command)
        run = self._workers(command.deployment)
        if run is not None:
            self._stopped.append(run)

    def _migrate_state(self, command: cmd.MigrateState) -> None:
        self._states.migrate(command)

    def _prefetch_state(self, command: cmd.PrefetchState) -> None:
        self._states.prefetch(command)

    def _run_operation(self, command: cmd.Run) -> None:
        run = self._workers(command.deployment)
        assert run is not None, f"{command.operation} runs on no deployment"
        kind = MOVES.get(command.kind, "run")
        if kind != "run":
            move = self._states.begin(command)
            run.move = move
            took_s = move.took_s
        elif isinstance(run, RolloutWorkers):
            kind, took_s = "rollout", run.seconds(command.operation)
        elif command.operation == run.operation:
            took_s = run.steps[run.step].work_s / run.speed
        else:
            # The operation is repeated: its result was lost with its workers.
            took_s = run.step_named(command.operation).work_s / run.speed
        shell = self.shell
        now = shell.now
        run.run = command
        run.run_kind = kind
        run.run_began_at = now
        run.run_s = took_s
        shell.at(now + took_s, self._run_ended, command)

    def _run_ended(self, command: cmd.Run) -> None:
        run = self._workers(command.deployment)
        if run is None or run.run is not command:
            # Its workers were lost meanwhile.
            return
        kind = run.run_kind
        self._record_run(run, command)
        computed_s = run.run_s - self._control_s
        if computed_s < 0.0:
            computed_s = 0.0
        operation = command.operation
        if kind not in ("run", "rollout"):
            self._move_ended(run, command, operation, computed_s)
            return
        self._send(ev.OperationFinished(operation, command.token, computed_s))
        if isinstance(run, RolloutWorkers):
            if run.owner.rolling and operation == run.operation():
                self._controllers.rollout_ended(run.owner)
        elif operation == run.operation:
            self._controllers.answered(run)

    def _move_ended(
        self, run: Workers, command: cmd.Run, operation: OperationId, computed_s: float
    ) -> None:
        move = run.move
        assert move is not None, f"{operation} ends that never began"
        if isinstance(move, Refusal):
            self._send(move.answer(command))
            return
        if run.run_kind == "offload" and command.kind == _OFFLOAD:
            self._switches += 1
            self._collector.switched(run.owner.job_id)
        moved, token = move.moved, command.token
        self._send(ev.OperationFinished(operation, token, computed_s, None, "{}", moved))
        for report in move.reports:
            self._send(report)

    def _record_run(self, run: Workers, command: cmd.Run) -> None:
        """Report a completed or interrupted run to the collector."""
        run.run = None
        began_at, now, job = run.run_began_at, self.shell.now, run.owner
        ran, part = self._collector.ran, run.rollout_part
        ran(command.group, job.job_id, run.gpus, run.run_kind, began_at, now, part)


def _node_types(scenario: Scenario) -> dict[str, NodeType]:
    """Node types by node name; the names contain the indices of pool and node."""
    return {
        f"p{index}n{number}": pool.node_type
        for index, pool in enumerate(scenario.pools)
        for number in range(pool.nodes)
    }
