"""A cluster that exists only as far as the scheduler core can tell: it carries out commands.

Each WPG's state is the list of mutations applied to it; a version is a copy of that list. Commands
take effect when the test says so, in any order that a real cluster could show.
"""

import random
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from plexrl.errors import PlexRLError
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.messages.views import ExplanationView
from plexrl.wire.operations import MUTATING, SUPERSEDING, OperationKind
from tests.scheduler.fake_wpg import Wpg, is_stored_step

MOVES = (OperationKind.LOAD, OperationKind.OFFLOAD, OperationKind.SNAPSHOT)
NODE_GPUS = 4


def config(**changes: object) -> SchedulerConfig:
    """A configuration for tests."""
    fields: dict[str, object] = {
        "policy": "pack",
        "listen": ("unix:/-",),
        "journal": "-",
        "operator_key_digest": "0",
        "snapshot_operations": 3,
        "launch_attempts": 100,
        **changes,
    }
    return SchedulerConfig(**fields)


CHECKED, CHECKED_EACH = 200, 16
"""After each of the first events, and then after each sixteenth, the core's invariants hold."""


class FakeCluster:
    """Drives a core, keeps the journal, executes commands when told to."""

    def __init__(self, **changes: object) -> None:
        self.config = config(**changes)
        self.core = SchedulerCore(self.config)
        self.now = 1000.0
        self.journal: list[tuple[ev.Event, float]] = []
        self.wpgs: dict[str, Wpg] = {}
        self.launches: list[cmd.LaunchWorkers] = []
        self.runs: list[Any] = []
        """Runs of all kinds; tests know which kind has which fields."""
        self.migrations: list[cmd.MigrateState] = []
        self.prefetches: list[cmd.PrefetchState] = []
        self.nodes: dict[str, ev.NodeJoined] = {}
        self.timer_at: float | None = None
        self.has_router = False
        self.hung: set[tuple[str, int]] = set()
        """Runs and launches that were sent, and never end."""
        self.interrupted: set[tuple[str, int]] = set()
        """Runs that were told to stop, and are to be continued."""
        self.partials: dict[str, str] = {}
        """What each interrupted generation has drawn."""
        self.compute_s = 0.1
        self.peak_bytes = 0
        """What workers report of their allocator."""
        """Of every operation, as its workers count it."""

    def send(self, event: ev.Event) -> list[cmd.Command]:
        """Give the core an event, as the shell does."""
        self.journal.append((event, self.now))
        commands = self.core.handle(event, self.now)
        # A check looks at all that there is, so a long history would take its length squared.
        if len(self.journal) <= CHECKED or len(self.journal) % CHECKED_EACH == 0:
            self.core.check_invariants()
        self.take(commands)
        return commands

    def take(self, commands: list[cmd.Command]) -> None:
        """Remember what is to be done."""
        for command in commands:
            match command:
                case cmd.SetTimer(at=at):
                    self.timer_at = at if self.timer_at is None else min(self.timer_at, at)
                case cmd.LaunchWorkers():
                    self.launches.append(command)
                case cmd.StopWorkers(deployment=name, incarnation=incarnation):
                    self.launches = [
                        launch
                        for launch in self.launches
                        if launch.deployment != name or launch.incarnation > incarnation
                    ]
                    wpg = self.wpgs.setdefault(name, Wpg())
                    if wpg.incarnation <= incarnation:
                        wpg.device = None
                        wpg.nodes = set()
                case cmd.ReleaseState(deployment=name):
                    wpg = self.wpgs.setdefault(name, Wpg())
                    for seq, nodes in wpg.held_on.items():
                        nodes.difference_update(command.nodes)
                        if not nodes:
                            wpg.versions.pop(seq, None)
                case cmd.MigrateState():
                    self.migrations.append(command)
                case cmd.PrefetchState():
                    self.prefetches.append(command)
                case cmd.DiscardBlobs(blobs=blobs):
                    self.partials = {k: v for k, v in self.partials.items() if v not in blobs}
                case cmd.AbortOperation() if command.token:
                    self.interrupted.add((command.operation, command.token))
                case cmd.Run():
                    if self.has_router and command not in self.runs:
                        self.runs.append(command)

    def start_node(self, gpus: int = NODE_GPUS) -> None:
        """A node and a router join."""
        self.join_node(gpus)
        self.join_router()

    def join_node(self, gpus: int = NODE_GPUS, node: str = "n", **fields: object) -> None:
        """A node's agent connects, with all its workers alive."""
        known = self.nodes.get(node)
        if known is None:
            known = ev.NodeJoined(
                node=node,
                gpus=gpus,
                gpu_memory_bytes=1 << 30,
                statemanager=f"sm:{node}",
                **{"host_memory_bytes": 1 << 30, **fields},
            )
        self.nodes[node] = replace(known, workers=tuple(self.alive(node)))
        self.send(self.nodes[node])

    def lose_node(self, node: str) -> None:
        """A node dies with all its processes; what its StateManager holds is there again later."""
        for wpg in self.wpgs.values():
            if node in wpg.nodes:
                wpg.device = None
                wpg.nodes = set()
        self.runs = [run for run in self.runs if self.wpgs[run.deployment].nodes]
        self.launches = [
            launch for launch in self.launches if node not in {rank.node for rank in launch.ranks}
        ]
        self.migrations = [each for each in self.migrations if node not in each.nodes]
        self.send(ev.NodeLost(node=node))

    def migrate(self, command: cmd.MigrateState, error: str = "") -> None:
        """The target nodes' StateManagers fetch a version, or fail to."""
        self.migrations.remove(command)
        wpg = self.wpgs[command.deployment]
        for node in command.nodes:
            if not error:
                holders = {f"sm:{each}" for each in wpg.held_on[command.seq]}
                # A repeated command finds the version there.
                if not holders & {*command.sources, f"sm:{node}"}:
                    view = self.core.deployment_view(command.deployment, self.now)
                    # A command of before the state was given up or computed anew is out of date.
                    assert view["state"] != "migrating", f"{command} asks nobody of {holders}"
                    error = "it is nowhere"
                else:
                    wpg.held_on[command.seq].add(node)
            self.send(
                ev.StateMigrated(
                    deployment=command.deployment, node=node, seq=command.seq, error=error
                )
            )

    def alive(self, node: str) -> list[ev.WorkerSeen]:
        """Every rank on a node of every WPG whose processes live."""
        found = []
        for view in [d for job in self.core.list_jobs(None, self.now) for d in job["deployments"]]:
            wpg = self.wpgs.get(view["deployment"])
            if wpg is None or view["state"] != "ready":
                continue
            if wpg.incarnation == view["incarnation"] and wpg.nodes:
                found += [
                    ev.WorkerSeen(
                        deployment=view["deployment"],
                        rank=rank["rank"],
                        incarnation=wpg.incarnation,
                        address=rank["address"],
                    )
                    for rank in view["ranks"]
                    if rank["node"] == node
                ]
        return found

    def join_router(self) -> None:
        """A router connects and is sent what is in flight."""
        self.has_router = True
        self.send(ev.RouterJoined(router="r"))

    def lose_router(self) -> None:
        """The router dies with all it was told."""
        self.has_router = False
        self.runs.clear()
        self.send(ev.RouterLost(router="r"))

    def restart_scheduler(self, *, restored: bool = False) -> None:
        """The scheduler dies; another one replays the journal (or part of it, from a snapshot) and
        meets everybody again."""
        former = self.core.dump()
        self.core = SchedulerCore(self.config)
        for event, at in self.journal:
            with suppress(PlexRLError):
                # Refused then, refused again.
                self.core.handle(event, at)
        assert self.core.dump() == former
        if restored:
            self.core = SchedulerCore.restore(self.config, former)
        self.runs.clear()
        self.launches.clear()
        self.timer_at = None
        self.has_router = False
        self.migrations.clear()
        self.send(ev.SchedulerStarted())
        for node in list(self.nodes):
            self.join_node(node=node)
        self.join_router()

    def job(self, name: str, tenant: str = "t", **fields: object) -> None:
        """Submit a job."""
        self.send(
            ev.JobSubmitted(
                job=name,
                tenant=tenant,
                name=name,
                controller_timeout_s=1e6,
                reattach_timeout_s=1e6,
                **fields,
            )
        )

    def deploy(self, name: str, kind: str = "train", workers: int = 2, **fields: object) -> None:
        """Create a deployment `<job>/<name>`."""
        self.send(
            ev.DeploymentCreated(
                deployment=name,
                job=name.split("/")[0],
                kind=kind,
                workers=workers,
                spec_json="{}",
                **{"exclusive": False, "state_bytes": 1000, **fields},
            )
        )

    def relayout(self, name: str, spec_json: str) -> list[cmd.Command]:
        """Divide a rollout's GPUs in another way."""
        return self.send(
            ev.DeploymentRelaid(deployment=name, state_bytes=2000, spec_json=spec_json)
        )

    def end(self, name: str) -> list[cmd.Command]:
        """End a deployment; its job goes on."""
        return self.send(ev.DeploymentEnded(deployment=name))

    def submit(
        self,
        operation: str,
        deployment: str,
        kind: str,
        source: str | None = None,
        **fields: object,
    ) -> None:
        """Submit an operation."""
        self.send(
            ev.OperationSubmitted(
                operation=operation,
                deployment=deployment,
                kind=OperationKind(kind),
                params=None,
                source=source,
                **fields,
            )
        )

    def state_of(self, operation: str) -> str:
        """The state the core shows for an operation."""
        return self.core.operation_view(operation, self.now)["state"]

    def explanation_of(self, operation: str) -> ExplanationView:
        """Why an unfinished operation waits."""
        explanation = self.core.operation_view(operation, self.now)["explanation"]
        assert explanation is not None, f"{operation} has ended"
        return explanation

    def error_of(self, operation: str) -> ErrorView:
        """The error of a failed operation."""
        error = self.core.operation_view(operation, self.now)["error"]
        assert error is not None, f"{operation} has not failed"
        return error

    def launch(self, launch: cmd.LaunchWorkers) -> None:
        """The agent starts a WPG's processes, and they get ready."""
        self.launches.remove(launch)
        wpg = self.wpgs.setdefault(launch.deployment, Wpg())
        if launch.incarnation < wpg.incarnation:
            return
        wpg.incarnation, wpg.device, wpg.highest_token = launch.incarnation, None, 0
        wpg.refused.clear()
        wpg.nodes = {rank.node for rank in launch.ranks}
        for rank in launch.ranks:
            self.send(
                ev.WorkerReady(
                    deployment=launch.deployment,
                    rank=rank.rank,
                    incarnation=launch.incarnation,
                    address=f"{launch.deployment}:{rank.rank}:{launch.incarnation}",
                )
            )

    def kill(self, deployment: str) -> None:
        """A worker of the deployment dies."""
        wpg = self.wpgs.get(deployment)
        if wpg is None or wpg.incarnation == 0:
            return
        wpg.device = None
        self.runs = [run for run in self.runs if run.deployment != deployment]
        self.send(
            ev.WorkerExited(
                deployment=deployment, rank=0, incarnation=wpg.incarnation, reason="killed"
            )
        )

    def hang(self, chance: random.Random) -> None:
        """Workers never end a run, or never start."""
        if self.runs and chance.random() < 0.7:
            run = self.runs.pop(chance.randrange(len(self.runs)))
            self.hung.add((run.operation, run.token))
        elif self.launches:
            launch = self.launches.pop(chance.randrange(len(self.launches)))
            self.hung.add((launch.deployment, launch.incarnation))

    def execute(
        self, run: cmd.Run, *, report: bool = True, trainer_step: int | None = None
    ) -> None:
        """The workers carry out a run; `report` false loses the answer (the run stays to be asked
        for again, as a router that died would have it). `trainer_step` is what they say of it."""
        wpg = self.wpgs[run.deployment]
        if self.is_out_of_date(run):
            # There is no answer.
            self.runs.remove(run)
            return
        assert run.token >= wpg.highest_token, "a stale run reached the workers"
        wpg.highest_token = run.token
        name = (run.operation, run.token)
        assert name not in wpg.refused, "a run that was refused is asked for under the same name"
        self._apply(wpg, run)
        former = run.partial if isinstance(run, cmd.Generate) else None
        assert former == self.partials.get(run.operation), "it continues from something else"
        if report:
            self.runs.remove(run)
            partial = f"{run.operation}.{run.token}" if name in self.interrupted else None
            self.partials.pop(run.operation, None)
            if partial is not None:
                self.partials[run.operation] = partial
            self.send(
                ev.OperationFinished(
                    operation=run.operation,
                    token=run.token,
                    compute_s=self.compute_s,
                    peak_bytes=self.peak_bytes,
                    trainer_step=trainer_step,
                    result=partial,
                    unfinished_rows=int(partial is not None),
                )
            )
            if run.operation not in self.core._context.state.operations or (
                self.core._context.state.operations[run.operation].state.is_final
            ):
                self.partials.pop(run.operation, None)

    def refusable(self) -> list[cmd.Run]:
        """Runs that the workers could refuse: they are there, and have not carried the run out."""
        found = []
        for run in self.runs:
            wpg = self.wpgs[run.deployment]
            state = wpg.versions.get(run.seq) if is_stored_step(run) else wpg.device
            is_done = run.kind in MOVES or run.operation in (state or ())
            if not is_done and not self.is_out_of_date(run):
                found.append(run)
        return found

    def refuse(self, run: cmd.Run, code: str = "storage_full") -> None:
        """The workers refuse a run for want of room, and change nothing."""
        wpg = self.wpgs[run.deployment]
        assert run.token >= wpg.highest_token, "a stale run reached the workers"
        wpg.highest_token = run.token
        name = (run.operation, run.token)
        assert name not in wpg.refused, "a run that was refused is asked for under the same name"
        wpg.refused.add(name)
        self.runs.remove(run)
        self.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error={"code": code, "message": "no room", "details": {}},
                state_intact=True,
            )
        )

    def is_out_of_date(self, run: cmd.Run) -> bool:
        """Whether a run was sent to processes that are gone."""
        wpg = self.wpgs[run.deployment]
        alive = f":{wpg.incarnation}" if wpg.nodes else "nobody"
        return not all(address.endswith(alive) for address in run.addresses)

    def _apply(self, wpg: Wpg, run: cmd.Run) -> None:
        if run.kind == OperationKind.LOAD:
            if wpg.device is None:
                assert run.seq == 0 or run.seq in wpg.versions, f"no version {run.seq}"
                held_on = wpg.held_on.get(run.seq, set())
                assert run.seq == 0 or wpg.nodes <= held_on, f"{run.seq} lies on {held_on} only"
                wpg.device = list(wpg.versions.get(run.seq, []))
            return
        if isinstance(run, cmd.Offload | cmd.Snapshot):
            wpg.store(run)
            if run.kind == OperationKind.OFFLOAD:
                wpg.device = None
            return
        if isinstance(run, cmd.SaveCheckpoint) and wpg.device is None:
            assert run.seq == max(wpg.versions, default=0), f"{run.seq} is not the state"
            return
        if isinstance(run, cmd.OptimStep) and run.stored is not None:
            wpg.step_stored(run, run.stored)
            return
        assert wpg.device is not None, f"{run.operation} ran without its state on the device"
        if run.kind in MUTATING and run.operation not in wpg.device:
            if run.kind in SUPERSEDING:
                # Whatever was applied before is overwritten; keep it to compare the order.
                wpg.device = [*wpg.device]
            wpg.device.append(run.operation)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with the timers that come due."""
        until = self.now + seconds
        while self.timer_at is not None and self.timer_at <= until:
            self.now = max(self.now, self.timer_at)
            self.timer_at = None
            self.send(ev.TimerFired())
        self.now = until

    def run_until(self, operation: str) -> None:
        """Carry everything out until this operation is the only run."""
        while [run.operation for run in self.runs] != [operation]:
            if self.runs:
                self.execute(self.runs[0])
            else:
                self.pass_time(1.0)

    def settle(self) -> None:
        """Carry everything out until nothing is left to do."""
        if not self.has_router:
            self.join_router()
        for _ in range(2000):
            if self.launches:
                self.launch(self.launches[0])
            elif self.migrations:
                self.migrate(self.migrations[0])
            elif self.runs:
                self.execute(self.runs[0])
            elif self.timer_at is not None and self.timer_at < self.now + 100:
                self.pass_time(self.timer_at - self.now)
            else:
                return
        raise AssertionError("the cluster never comes to rest")


class Quick(FakeCluster):
    """Checks the laws of the state after some events only."""

    def __init__(self, chance: random.Random, check_part: float, **changes: object) -> None:
        super().__init__(**changes)
        self._chance = chance
        self._check_part = check_part
        self.reports: list[ev.Event] = []
        """Sent before, to be sent again too late."""

    def send(self, event: ev.Event) -> list[cmd.Command]:
        self.journal.append((event, self.now))
        commands = self.core.handle(event, self.now)
        if self._chance.random() < self._check_part:
            self.core.check_invariants()
        self.take(commands)
        if isinstance(event, ev.OperationFinished | ev.OperationFailed):
            self.reports.append(event)
        return commands
