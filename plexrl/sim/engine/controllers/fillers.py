"""Endless preemptible generation in the idle time of all training groups.

As many deployments of a size generate as there are groups of that size. Each has the weights of the
model that the group trains, and always another generation to do. An interrupted generation ends
after one decode step, and a continued one first computes its KV cache again.
"""

from collections.abc import Callable

from plexrl.errors import CapacityError, ModelDoesNotFitError
from plexrl.ids import BlobRef, OperationId, TenantId
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.shell import FOREVER_S, VirtualShell, worker_ready_events
from plexrl.sim.engine.statemanagers import NodeStates, Refusal
from plexrl.sim.metrics.collector import Collector, RunKind
from plexrl.sim.metrics.group_members import GroupMembers
from plexrl.sim.workload.job_run import WEIGHTS_PART, Filler, JobRun
from plexrl.sim.workload.scenario import Scenario
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind

TENANT = TenantId("preemptible")

GIVE_WAY_S = 0.1
"""From the order to interrupt a generation to its end: a decode step, and the samples so far."""

RECOMPUTE_S = 2.0
"""Seconds in which a generation computes the KV cache of its samples; they count as lost."""


class Fillers:
    """All preemptible deployments of a run."""

    def __init__(
        self,
        shell: VirtualShell,
        states: NodeStates,
        collector: Collector,
        groups: GroupMembers,
        send: Callable[[ev.Event], None],
        scenario: Scenario,
    ) -> None:
        """`send` passes an event to the core."""
        self._shell = shell
        self._states = states
        self._collector = collector
        self._groups = groups
        self._send = send
        self._launch_s = scenario.launch_s
        self._control_s = scenario.control_s
        self._all: dict[str, Filler] = {}
        self._sizes: dict[int, int] = {}
        """Number of fillers by GPUs."""

    def group_joined(self, run: JobRun) -> None:
        """A training deployment has joined a group, perhaps a new one."""
        self._shell.at(self._shell.now, self._add, run)

    def end(self) -> None:
        """End all of them."""
        for filler in self._all.values():
            if filler.run is not None and filler.run.kind is OperationKind.GENERATE:
                self._interrupted(filler.run)
            self._send(ev.JobFinished(job=filler.job, outcome="cancelled"))

    def handle(self, command: cmd.Command) -> bool:
        """Carry out a command for one of them. False: it is for another deployment."""
        filler = self._all.get(getattr(command, "deployment", ""))
        if filler is None:
            return False
        match command:
            case cmd.LaunchWorkers():
                self._states.launched(command, filler.state_bytes)
                filler.incarnation = command.incarnation
                gpus = tuple((str(rank.node), rank.gpu) for rank in command.ranks)
                self._groups.put(filler, command.group, gpus, self._shell.now)
                self._shell.at(self._shell.now + self._launch_s, self._launched, command)
            case cmd.Run():
                self._run(filler, command)
            case cmd.AbortOperation():
                run = filler.run
                if run is not None and run.operation == command.operation:
                    self._shell.at(self._shell.now + GIVE_WAY_S, self._interrupted, run)
            case cmd.StopWorkers():
                filler.run = None
                self._groups.remove(filler, self._shell.now)
            case cmd.ReleaseState():
                self._states.release(command)
            case cmd.MigrateState():
                self._states.migrate(command)
            case cmd.PrefetchState():
                self._states.prefetch(command)
        return True

    def _add(self, run: JobRun) -> None:
        groups = self._shell.core.list_groups(self._shell.now)
        wanted = sum(len(group["gpus"]) == run.gpus and group["shared"] for group in groups)
        if self._sizes.get(run.gpus, 0) >= wanted:
            return
        self._sizes[run.gpus] = self._sizes.get(run.gpus, 0) + 1
        state_bytes = max(1, round(WEIGHTS_PART * run.state_bytes))
        filler = Filler(len(self._all), run.gpus, state_bytes)
        if not self._all:
            self._send(ev.TenantCreated(tenant=TENANT, key_digest=TENANT, is_operator=True))
        self._all[filler.deployment] = filler
        self._send(
            ev.JobSubmitted(
                job=filler.job,
                tenant=TENANT,
                name=filler.job,
                controller_timeout_s=FOREVER_S,
                reattach_timeout_s=FOREVER_S,
            )
        )
        created = ev.DeploymentCreated(
            deployment=filler.deployment,
            job=filler.job,
            kind="rollout",
            workers=filler.gpus,
            state_bytes=filler.state_bytes,
            exclusive=False,
            spec_json="{}",
            preemptible=True,
        )
        try:
            self._send(created)
        except (CapacityError, ModelDoesNotFitError):
            return
        self._send(
            ev.OperationSubmitted(
                OperationId(f"{filler.deployment}:0"),
                filler.deployment,
                OperationKind.GENERATE,
            )
        )

    def _launched(self, command: cmd.LaunchWorkers) -> None:
        if self._all[command.deployment].incarnation != command.incarnation:
            return
        for rank, event in zip(command.ranks, worker_ready_events(command), strict=True):
            if not self._states.is_away(rank.node):
                self._send(event)

    def _run(self, filler: Filler, command: cmd.Run) -> None:
        now = self._shell.now
        filler.run, filler.run_began_at = command, now
        if command.kind is not OperationKind.GENERATE:
            move = filler.move = self._states.begin(command)
            self._shell.at(now + move.took_s, self._moved, command)

    def _moved(self, command: cmd.Run) -> None:
        filler = self._all[command.deployment]
        if filler.run is not command:
            return
        filler.run, move = None, filler.move
        assert move is not None, f"{command.operation} ends that never began"
        began_at, now = filler.run_began_at, self._shell.now
        kind: RunKind = "load" if command.kind is OperationKind.LOAD else "offload"
        ran, part = self._collector.ran, filler.rollout_part
        ran(command.group, filler.job, filler.gpus, kind, began_at, now, part)
        if isinstance(move, Refusal):
            self._send(move.answer(command))
            return
        computed_s = max(0.0, now - began_at - self._control_s)
        finished = ev.OperationFinished(
            command.operation, command.token, computed_s, None, "{}", move.moved
        )
        self._send(finished)
        for report in move.reports:
            self._send(report)

    def _interrupted(self, command: cmd.Run) -> None:
        filler = self._all[command.deployment]
        if filler.run is not command:
            # Its workers were lost meanwhile, or it was ordered twice.
            return
        filler.run = None
        took_s = self._shell.now - filler.run_began_at
        is_first = not isinstance(command, cmd.Generate) or command.partial is None
        lost_s = 0.0 if is_first else RECOMPUTE_S
        useful_gpu_s = filler.gpus * max(0.0, took_s - lost_s)
        self._collector.filled(useful_gpu_s, filler.rollout_part)
        self._send(
            ev.OperationFinished(
                command.operation,
                command.token,
                max(0.0, took_s - self._control_s),
                BlobRef(f"{command.operation}.{command.token}"),
                unfinished_rows=1,
            )
        )
