"""A random history of a small cluster, made by one seed: jobs, gangs, drains, losses, faults.

    python -m tests.scheduler.random_history FIRST COUNT     (a line for each history that fails)

After every step each accepted operation must have a cause to go on (`liveness`). At the end all
nodes come back, everything outstanding is reported, and time passes: then every accepted operation
must end. Where jobs need the GPUs of others that have nothing to do, those end.
"""

import random
import sys
import traceback
from contextlib import suppress

from msgspec.structs import replace

from plexrl.errors import PlexRLError
from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.ordering import ORDERINGS
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from plexrl.wire.operations import USER_KINDS, OperationKind
from tests.scheduler.fake_cluster import Quick
from tests.scheduler.liveness import stuck
from tests.scheduler.random_memory import RandomMemory

NODES = ("n1", "n2", "n3")
GPUS = 2
WARM = DemandTrace(period_s=60.0, segments=(Segment(offset_s=0.0, duration_s=15.0),))
POLICIES = ("isolated", "pack", "pack", "spread", "spread+backfill", "co-execution")
TRAIN_KINDS = sorted(kind.value for kind in USER_KINDS["train"])
CYCLES = {"rollout": ("sync_weights", "generate"), "forward": ("forward",), "batch": ("generate",)}
INTACT_CODES = ("state_tier_full", "execution_failed", "unavailable")
BROKEN_CODES = ("execution_failed", "connection_lost", "state_lost", "state_tier_full")
QUIET_S = 5000.0
"""Timers further away than this are of no operation."""
STEPS_MAX = 4000


class History:
    """One history; `run` raises where the core has a fault or is stuck."""

    def __init__(self, seed: int, check_part: float = 0.02) -> None:
        self.chance = chance = random.Random(seed)
        self.cluster = Quick(
            chance,
            check_part,
            policy=chance.choice(POLICIES),
            ordering=chance.choice(sorted(ORDERINGS)),
            anticipation=chance.choice((None, True, False)),
            horizon_slots=600,
            profile_cycles=1,
            repack_interval_s=30.0,
            waiting_part_max=chance.choice((0.05, 0.2, 1.0)),
            starvation_bound_s=200.0,
            cold_start_patience_s=chance.choice((0.0, 60.0)),
            node_replace_s=chance.choice((0.0, 50.0, 1e6)),
            rebuild_operations=chance.choice((0, 4, 1000)),
            residents_max=chance.choice((2, 8)),
            history=chance.choice((1, 4, 1000)),
            ended_jobs=chance.choice((1, 1000)),
            snapshot_operations=chance.choice((1, 3)),
            lost_nodes_return=chance.random() < 0.8,
            launch_attempts=chance.choice((3, 100)),
            relief_after_s=chance.choice((0.0, 60.0)),
            operation_overdue_s=20.0,
        )
        self.jobs = 0
        self.count = 0
        self.deployments: dict[str, str] = {}
        """Kind of each, of jobs that were not ended by us."""
        self.operations: list[tuple[str, str, str, str | None]] = []
        self.up: set[str] = set()
        self.blocked = 0
        """Times that jobs held GPUs and waited for more, all of them."""
        self.memory = RandomMemory(seed, self.cluster)
        for node in NODES:
            self.cluster.join_node(
                GPUS, node=node, node_type="t", nvme_bytes=1 << 30, gpu_kind=self.memory.gpu_kind
            )
            self.up.add(node)
        self.cluster.join_router()

    def run(self, steps: int) -> None:
        """Do this many things, then have everything end."""
        chance = self.chance
        moves = (
            *((self.deliver, 34), (self.submit, 16), (self.submit_job, 4), (self.cancel, 3)),
            *((self.fail_run, 5), (self.lose_answer, 2), (self.report_again, 3)),
            *((self.node, 4), (self.drain, 2), (self.kill, 2), (self.pass_time, 8)),
            *((self.end_job, 1), (self.restart, 1), (self.router, 1), (self.quota, 1)),
            *((self.cycle, 5), (self.leave_job, 2), (self.attach_job, 2), (self.relayout, 1)),
            *((self.end_deployment, 1), (self.hang, 2)),
        )
        whats, weights = zip(*moves, strict=True)
        for _ in range(chance.choice((2, 4, 6))):
            self.submit_job()
        self.cycle()
        for _ in range(steps):
            (what,) = chance.choices(whats, weights)
            what()
            assert not (found := stuck(self.cluster)), f"after {what.__name__}: {found[0]}"
        self.quiesce()

    # What can happen

    def submit_job(self) -> None:
        if len(self.deployments) > 7:
            return
        chance, cluster = self.chance, self.cluster
        self.jobs += 1
        # Names of jobs that are over, and perhaps forgotten, are used again.
        job = f"j{self.jobs % 9}"
        has_rollout = chance.random() < 0.35
        shares = has_rollout and chance.random() < 0.5
        with suppress(PlexRLError):
            slo = chance.choice((None, None, None, 0.0, 0.02, 0.6))
            cluster.job(job, tenant=chance.choice("tu"), gang=2 * has_rollout, slo=slo)
            workers = min(
                chance.choice((1, 2, 2, 2, 4)),
                sum(node["gpus"] for node in cluster.core.list_nodes()) - has_rollout,
            )
            if workers < 1:
                return
            actor = f"{job}/actor"
            kind = chance.choice(("train", "train", "train", "forward"))
            kind = "train" if has_rollout else kind
            has_batch = not has_rollout and chance.random() < 0.3
            self.memory.deploy(
                actor,
                kind,
                workers=workers,
                trace=WARM if chance.random() < 0.4 else None,
                exclusive=not shares and chance.random() < 0.1,
                steps_in_host=kind == "train" and self.jobs % 2 == 0,
            )
            self.deployments[actor] = kind
            if has_batch:
                size = chance.choice((workers, workers, 1, 2))
                self.memory.deploy(f"{job}/batch", "rollout", size, preemptible=True)
                self.deployments[f"{job}/batch"] = "batch"
            if not has_rollout:
                return
            try:
                gpus = workers if shares and chance.random() < 0.7 else 1
                trace = WARM if shares and chance.random() < 0.5 else None
                sharing = {"shares": shares, "shares_if_scarce": not shares and self.jobs % 2 == 0}
                self.memory.deploy(f"{job}/rollout", "rollout", gpus, trace=trace, **sharing)
            except PlexRLError:
                # There is no room for all of it: a gang that is never whole waits rightly.
                self._end(job, "cancelled")
                return
            self.deployments[f"{job}/rollout"] = "rollout"

    def submit(self) -> None:
        if not self.deployments:
            return
        name = (chance := self.chance).choice(sorted(self.deployments))
        source: str | None = None
        if self.deployments[name] == "rollout":
            kind = chance.choice(("generate", "sync_weights", "sync_weights", "barrier"))
            if kind == "sync_weights":
                source = name.replace("rollout", "actor")
        elif self.deployments[name] == "batch":
            kind = chance.choice(("generate", "generate", "sync_weights"))
            if kind == "sync_weights":
                source = name.replace("batch", "actor")
        elif self.deployments[name] == "forward":
            kind = chance.choice(("forward", "barrier"))
        else:
            kind = chance.choice(TRAIN_KINDS)
        self.count += 1
        operation = f"o{self.count}"
        if self.operations and chance.random() < 0.05:
            operation, name, kind, source = chance.choice(self.operations)
        self._submit(operation, name, kind, source)

    def _submit(self, operation: str, name: str, kind: str, source: str | None) -> None:
        chance = self.chance
        self.operations.append((operation, name, kind, source))
        with suppress(PlexRLError):
            self.cluster.submit(
                operation,
                name,
                kind,
                source,
                in_flight=kind == "sync_weights" and "batch" not in name and chance.random() < 0.5,
                published=kind == "sync_weights" and chance.random() < 0.3,
                deadline_s=chance.choice((None, None, None, 20.0, 1e5)),
                tokens=chance.choice((0, 100)),
                ends_burst=chance.random() < 0.1,
            )

    def cycle(self) -> None:
        """Everybody has a whole training cycle to do."""
        for name, kind in sorted(self.deployments.items()):
            for step in CYCLES.get(kind, ("forward_backward", "optim_step")):
                source = name.replace("rollout", "actor") if step == "sync_weights" else None
                self.count += 1
                self._submit(f"o{self.count}", name, step, source)

    def relayout(self) -> None:
        """A rollout gets another layout."""
        if rollouts := [name for name, kind in self.deployments.items() if kind == "rollout"]:
            with suppress(PlexRLError):
                self.cluster.relayout(self.chance.choice(rollouts), self.chance.choice("12"))

    def end_deployment(self) -> None:
        with suppress(PlexRLError, IndexError):
            self.cluster.end(name := self.chance.choice(sorted(self.deployments)))
            del self.deployments[name]

    def cancel(self) -> None:
        if self.operations:
            name = self.chance.choice(self.operations[-12:])[0]
            with suppress(PlexRLError):
                self.cluster.send(
                    ev.OperationCancelled(operation=name + self.chance.choice(("", "", "#publish")))
                )

    def deliver(self) -> None:
        """Something that is under way succeeds."""
        cluster, chance = self.cluster, self.chance
        for _ in range(chance.choice((1, 1, 4))):
            count = len(cluster.runs), len(cluster.launches), len(cluster.migrations)
            if not any(count):
                return
            if chance.random() < 0.5:
                cluster.pass_time(chance.choice((0.01, 1.0, 10.0)))
            (what,) = chance.choices(("run", "launch", "migrate"), count)
            if what == "run" and cluster.runs:
                cluster.execute(chance.choice(cluster.runs))
            elif what == "launch" and cluster.launches:
                cluster.launch(chance.choice(cluster.launches))
            elif cluster.migrations:
                cluster.migrate(
                    chance.choice(cluster.migrations), chance.choice(("", "", "no room"))
                )

    def fail_run(self) -> None:
        """A run ends badly: of a caller's, a publish, a move, a replay."""
        cluster, chance = self.cluster, self.chance
        if not cluster.runs:
            return
        run = chance.choice(cluster.runs)
        if cluster.is_out_of_date(run):
            return
        is_intact = chance.random() < 0.6
        wpg = cluster.wpgs[run.deployment]
        if run.kind == OperationKind.OFFLOAD and wpg.device is None:
            # It was carried out, and only its answer was lost.
            return
        code = chance.choice(INTACT_CODES if is_intact else BROKEN_CODES)
        if code == "state_lost" and run.kind != OperationKind.SYNC_WEIGHTS:
            code = "execution_failed"
        cluster.runs.remove(run)
        if not is_intact and run.kind != OperationKind.SYNC_WEIGHTS:
            # Weights that cannot be pulled leave those that are there.
            wpg.device = None
        cluster.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error=self.memory.refusal(run) or {"code": code, "message": "no", "details": {}},
                state_intact=is_intact,
            )
        )

    def lose_answer(self) -> None:
        if self.cluster.runs:
            self.cluster.execute(self.chance.choice(self.cluster.runs), report=False)

    def hang(self) -> None:
        self.cluster.hang(self.chance)

    def report_again(self) -> None:
        """A report of before comes once more, now that it is not true any more."""
        if self.cluster.reports:
            self.cluster.send(self.chance.choice(self.cluster.reports[-20:]))

    def node(self) -> None:
        node = self.chance.choice(NODES)
        if node in self.up:
            self.up.remove(node)
            there = [
                launch
                for launch in self.cluster.launches
                if node in {rank.node for rank in launch.ranks}
            ]
            self.cluster.lose_node(node)
            for launch in there:
                if self.chance.random() < 0.5:
                    self._report_late(launch)
        else:
            self._join(node, self.chance.choice((1, GPUS, GPUS)))

    def _report_late(self, launch: cmd.LaunchWorkers) -> None:
        """Workers were ready just before their node was lost."""
        for rank in launch.ranks:
            self.cluster.send(
                ev.WorkerReady(
                    deployment=launch.deployment,
                    rank=rank.rank,
                    incarnation=launch.incarnation,
                    address=f"{launch.deployment}:{rank.rank}:{launch.incarnation}",
                )
            )

    def _join(self, node: str, gpus: int) -> None:
        self.up.add(node)
        self.cluster.nodes[node] = replace(self.cluster.nodes[node], gpus=gpus)
        self.cluster.join_node(node=node)

    def drain(self) -> None:
        self.cluster.send(
            ev.NodeDrainChanged(
                node=self.chance.choice(NODES), is_draining=self.chance.random() < 0.5
            )
        )

    def kill(self) -> None:
        if self.deployments:
            self.cluster.kill(self.chance.choice(sorted(self.deployments)))

    def pass_time(self) -> None:
        self.cluster.pass_time(self.chance.choice((0.1, 5.0, 100.0)))

    def end_job(self) -> None:
        if self.deployments:
            name = self.chance.choice(sorted(self.deployments))
            self._end(name.split("/")[0], self.chance.choice(("completed", "cancelled")))

    def leave_job(self) -> None:
        """A controller detaches its job."""
        if self.deployments:
            job = self.chance.choice(sorted(self.deployments)).split("/")[0]
            with suppress(PlexRLError):
                self.cluster.send(ev.JobFinished(job=job, outcome="detached"))

    def attach_job(self) -> None:
        """A controller comes, or one that was there shows that it lives."""
        if self.deployments:
            job = self.chance.choice(sorted(self.deployments)).split("/")[0]
            self.count += 1
            with suppress(PlexRLError):
                self.cluster.send(ev.ControllerAttached(job=job, controller=f"c{self.count}"))

    def _end(self, job: str, outcome: str) -> None:
        for name in [each for each in self.deployments if each.split("/")[0] == job]:
            del self.deployments[name]
        with suppress(PlexRLError):
            self.cluster.send(ev.JobFinished(job=job, outcome=outcome))

    def restart(self) -> None:
        """Another scheduler takes over, from a snapshot."""
        cluster = self.cluster
        cluster.core = SchedulerCore.restore(cluster.config, cluster.core.dump())
        cluster.runs.clear()
        cluster.launches.clear()
        cluster.migrations.clear()
        cluster.timer_at = None
        cluster.has_router = False
        cluster.send(ev.SchedulerStarted())
        for node in NODES:
            if node in self.up:
                cluster.join_node(node=node)
        cluster.join_router()
        for node in NODES:
            if node not in self.up:
                cluster.lose_node(node)

    def router(self) -> None:
        if self.cluster.has_router:
            self.cluster.lose_router()
        if self.chance.random() < 0.8:
            self.cluster.join_router()

    def quota(self) -> None:
        limits = (None, None, self.chance.choice((0, 1, 4)))
        self._limit(self.chance.choice("tu"), self.chance.choice(limits))

    def _limit(self, tenant: str, limit: int | None) -> None:
        with suppress(PlexRLError):
            self.cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
        slo = None if limit is None else 0.1
        bounds = {"jobs_max": limit, "gpus_max": None, "gpu_seconds_max": None, "slo": slo}
        self.cluster.send(ev.TenantConfigured(tenant=tenant, weight=1.0, **bounds))

    # The end

    def quiesce(self) -> None:
        """Have everything that was accepted end."""
        cluster = self.cluster
        for tenant in "tu":
            self._limit(tenant, None)
        for node in NODES:
            cluster.send(ev.NodeDrainChanged(node=node, is_draining=False))
            self._join(node, GPUS)
        if not cluster.has_router:
            cluster.join_router()
        while True:
            self._settle()
            cluster.core.check_invariants()
            unfinished = self._unfinished()
            if not unfinished:
                return
            assert not (found := stuck(cluster)), f"at rest: {found[0]}"
            self._make_room(unfinished)

    def _settle(self) -> None:
        cluster = self.cluster
        for _ in range(STEPS_MAX):
            if cluster.launches:
                cluster.launch(cluster.launches[0])
            elif cluster.migrations:
                cluster.migrate(cluster.migrations[0])
            elif cluster.runs:
                cluster.pass_time(0.1)
                if cluster.runs:
                    cluster.execute(cluster.runs[0])
            elif cluster.timer_at is not None and cluster.timer_at < cluster.now + QUIET_S:
                cluster.pass_time(max(0.0, cluster.timer_at - cluster.now))
            else:
                return
        raise AssertionError("the cluster never comes to rest")

    def _unfinished(self) -> dict[OperationId, DeploymentId]:
        """Operations that have not ended, with their deployments."""
        state = self.cluster.core._context.state
        return {
            name: each.deployment
            for name, each in state.operations.items()
            if not each.state.is_final
        }

    def _make_room(self, unfinished: dict[OperationId, DeploymentId]) -> None:
        """End a job that has GPUs and nothing to do; all that has not ended waits for GPUs."""
        state = self.cluster.core._context.state
        for name in unfinished.values():
            each = state.deployments[name]
            owner = state.jobs[each.job]
            # No group of its size, or no other member of its gang, needs to come.
            is_filler = each.spec.preemptible and not each.placement.groups
            if is_filler or len(owner.deployments) < owner.gang:
                self._end(owner.job, "completed")
                return
        lasting = (each for each in state.deployments.values() if not each.spec.preemptible)
        of_waiting = [each for each in lasting if each.wpg.state == WpgState.WAITING]
        waiting = {each.job for each in of_waiting}
        busy = {state.deployments[name].job for name in unfinished.values()}
        needs = {job: sum(e.spec.workers for e in of_waiting if e.job == job) for job in waiting}
        free = len(NODES) * GPUS - sum(len(group.gpus) for group in state.groups.values())
        # All nodes are there and nobody is at a quota: who is first of all may have them.
        assert free < max(needs.values(), default=free + 1), f"{free} GPUs are free for {needs}"
        for job in busy - waiting:
            raise AssertionError(
                f"{job} has its GPUs, is at rest and not at an end: "
                f"{[name for name, each in unfinished.items() if each.split('/')[0] == job]}"
            )
        live = [
            job.job
            for job in state.jobs.values()
            if not job.state.is_final
            and any(state.deployments[name].has_gpus for name in job.deployments)
        ]
        idle = [job for job in live if job not in busy]
        if not idle and live:
            self.blocked += 1
        assert live, f"nobody has GPUs, and these wait for some: {unfinished}"
        self._end((idle or live)[0], "completed")


def main(first: int, count: int) -> int:
    """Run the histories of so many seeds; returns how many failed."""
    failed = blocked = 0
    for seed in range(first, first + count):
        try:
            history = History(seed)
            history.run(history.chance.choice((10, 40, 90)))
            blocked += history.blocked
        except Exception as error:
            failed += 1
            cause = error.__cause__ or error
            where = traceback.extract_tb(cause.__traceback__)[-1]
            text = str(cause).splitlines()[0] if str(cause) else ""
            sys.stdout.write(
                f"seed {seed}: {error!r:.60} {where.name}:{where.lineno} {text:.700}\n"
            )
            sys.stdout.flush()
        if (seed - first + 1) % 1000 == 0:
            sys.stdout.write(f"{seed - first + 1} done, {failed} failed, {blocked} blocked\n")
            sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
