"""The whole core against a model: a small cluster of several nodes on which anything may happen.

Jobs come, run cycles, end and are cancelled; nodes die, return and are drained; profiles are made,
jobs are repacked into each other's gaps; the scheduler crashes and is replayed or restored from a
snapshot. The model is what each WPG must hold: a prefix of the mutations submitted to it, in their
order, none twice, and in the end all of them. The laws of the state and the equality of the
capacity index with one made anew are checked after every event.
"""

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from plexrl import errors
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import Run
from plexrl.wire.messages.views import DeploymentView
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.liveness import stuck

if TYPE_CHECKING:
    from plexrl.wire.messages.views import DeploymentView


NODES = ("n1", "n2", "n3")
WARM = DemandTrace(period_s=60.0, segments=(Segment(offset_s=0.0, duration_s=15.0),))


class Cluster(RuleBasedStateMachine):
    """Histories of a cluster of three nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: dict[str, list[str]] = {}
        self.count = 0
        self.jobs = 0
        self.up: set[str] = set()

    @initialize(
        policy=st.sampled_from(("isolated", "pack", "spread", "spread+backfill")),
        ordering=st.sampled_from(("hrrs", "hrrs-operations", "fifo-bursts")),
        node_replace_s=st.sampled_from((0.0, 50.0, 1e6)),
        rebuild_operations=st.sampled_from((0, 4, 1000)),
    )
    def start(
        self, policy: str, ordering: str, node_replace_s: float, rebuild_operations: int
    ) -> None:
        self.cluster = FakeCluster(
            policy=policy,
            ordering=ordering,
            horizon_slots=600,
            profile_cycles=1,
            repack_interval_s=30.0,
            waiting_part_max=0.2,
            starvation_bound_s=200.0,
            node_replace_s=node_replace_s,
            rebuild_operations=rebuild_operations,
        )
        for node in NODES:
            self.cluster.join_node(2, node=node, node_type="t", nvme_bytes=1 << 30)
            self.up.add(node)
        self.cluster.join_router()

    @precondition(lambda self: len(self.submitted) < 6)
    @rule(
        workers=st.sampled_from((1, 2, 2, 4)),
        warm=st.booleans(),
        priority=st.sampled_from((0, 0, 1)),
    )
    def submit_job(self, workers: int, warm: bool, priority: int) -> None:
        self.jobs += 1
        name = f"j{self.jobs}"
        deployment = f"{name}/actor"
        self.cluster.job(name, priority=priority)
        # Nodes may have come back with fewer GPUs: what could never fit is refused.
        workers = min(workers, sum(node["gpus"] for node in self.cluster.core.list_nodes()))
        trace = WARM if warm else None
        self.cluster.deploy(deployment, workers=workers, trace=trace)
        self.submitted[deployment] = []

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), steps=st.integers(1, 2), pause=st.sampled_from((1.0, 30.0)))
    def run_cycle(self, data: st.DataObject, steps: int, pause: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.submitted)))
        for kind in ("forward",) + ("forward_backward",) * steps + ("optim_step",):
            self._submit(name, kind)
        self.cluster.pass_time(pause)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), outcome=st.sampled_from(("completed", "cancelled")))
    def end_job(self, data: st.DataObject, outcome: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.submitted)))
        del self.submitted[name]
        self.cluster.send(ev.JobFinished(job=name.split("/")[0], outcome=outcome))

    @precondition(lambda self: self.cluster.runs)
    @rule(data=st.data(), report=st.sampled_from((True, True, True, False)))
    def execute(self, data: st.DataObject, report: bool) -> None:
        self.cluster.execute(data.draw(st.sampled_from(self.cluster.runs)), report=report)

    @rule(count=st.integers(1, 25))
    def work(self, count: int) -> None:
        for _ in range(count):
            if self.cluster.launches:
                self.cluster.launch(self.cluster.launches[0])
            elif self.cluster.runs:
                self.cluster.pass_time(2.0)
                if self.cluster.runs:
                    self.cluster.execute(self.cluster.runs[0])

    @precondition(lambda self: self.submitted)
    @rule(cycles=st.integers(1, 4), period=st.sampled_from((20.0, 60.0, 61.0)))
    def live(self, cycles: int, period: float) -> None:
        """Everybody runs whole cycles, in step, so that profiles are made and phases collide."""
        for _ in range(cycles):
            for name in self.submitted:
                self._submit(name, "forward_backward")
                self._submit(name, "optim_step")
            for _ in range(60):
                if self.cluster.launches:
                    self.cluster.launch(self.cluster.launches[0])
                elif self.cluster.migrations:
                    self.cluster.migrate(self.cluster.migrations[0])
                elif self.cluster.runs:
                    self.cluster.pass_time(0.5)
                    if self.cluster.runs:
                        self.cluster.execute(self.cluster.runs[0])
            self.cluster.pass_time(period)

    @precondition(lambda self: self.cluster.migrations)
    @rule(data=st.data(), error=st.sampled_from(("", "", "no room")))
    def migrate(self, data: st.DataObject, error: str) -> None:
        self.cluster.migrate(data.draw(st.sampled_from(self.cluster.migrations)), error)

    @precondition(lambda self: self._offloads())
    @rule()
    def refuse_offload(self) -> None:
        run = self._offloads()[0]
        self.cluster.runs.remove(run)
        self.cluster.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error={"code": "state_tier_full", "message": "no room", "details": {}},
                state_intact=True,
            )
        )

    @precondition(lambda self: self._loads())
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A load finds its version damaged: it is computed anew, if what led to it is kept."""
        run = data.draw(st.sampled_from(self._loads()))
        self.cluster.wpgs[run.deployment].versions.pop(run.seq, None)
        self.cluster.runs.remove(run)
        self.cluster.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error={"code": "corrupt_state", "message": "a block", "details": {}},
                state_intact=True,
            )
        )
        view = self.cluster.core.deployment_view(run.deployment, self.cluster.now)
        if view["state"] == "stopped" and run.deployment in self.submitted:
            assert self.cluster.config.rebuild_operations < 1000, f"{run} can be computed anew"
            del self.submitted[run.deployment]

    @precondition(lambda self: self.cluster.refusable())
    @rule(data=st.data())
    def refuse_run(self, data: st.DataObject) -> None:
        self.cluster.refuse(data.draw(st.sampled_from(self.cluster.refusable())))

    @rule(node=st.sampled_from(NODES), gpus=st.sampled_from((1, 2, 2)))
    def lose_or_return_node(self, node: str, gpus: int) -> None:
        if node in self.up:
            self.up.remove(node)
            self.cluster.lose_node(node)
        else:
            self.up.add(node)
            self._join(node, gpus)

    @rule(node=st.sampled_from(NODES), is_draining=st.booleans())
    def drain(self, node: str, is_draining: bool) -> None:
        self.cluster.send(ev.NodeDrainChanged(node=node, is_draining=is_draining))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        self.cluster.kill(data.draw(st.sampled_from(sorted(self.submitted))))

    @rule(restored=st.booleans())
    def crash(self, restored: bool) -> None:
        self.cluster.restart_scheduler(restored=restored)
        for node in NODES:
            if node not in self.up:
                self.cluster.lose_node(node)

    @rule(seconds=st.sampled_from((0.1, 5.0, 100.0)))
    def pass_time(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @invariant()
    def nothing_is_launched_on_gpus_that_are_not_there(self) -> None:
        for launch in self.cluster.launches:
            for rank in launch.ranks:
                assert rank.gpu < self.cluster.nodes[rank.node].gpus, launch

    @invariant()
    def every_device_holds_a_prefix_of_what_was_submitted(self) -> None:
        for name, wanted in self.submitted.items():
            wpg = self.cluster.wpgs.get(name)
            if wpg is not None and wpg.device is not None:
                assert wpg.device == wanted[: len(wpg.device)], name

    @invariant()
    def every_accepted_operation_has_a_cause_to_go_on(self) -> None:
        assert not stuck(self.cluster)

    def teardown(self) -> None:
        for node in NODES:
            self.cluster.send(ev.NodeDrainChanged(node=node, is_draining=False))
            self._join(node, 2)
        self.cluster.settle()
        views: dict[str, DeploymentView] = {
            each["deployment"]: each
            for job in self.cluster.core.list_jobs(None, self.cluster.now)
            for each in job["deployments"]
        }
        for name, wanted in self.submitted.items():
            view = views[name]
            if view["state"] == "waiting":
                assert not view["group"], "it waits and has GPUs"
                continue
            story = self.cluster.core.explain_job(view["job"], self.cluster.now)
            assert view["pending"] == 0, f"{name} is placed and does not run: {story}"
            wpg = self.cluster.wpgs[name]
            held = wpg.device
            if held is None:
                held = wpg.versions.get(view["durable_seq"], [])
            if view["residency"] in ("device", "offloaded"):
                assert held == wanted, name

    def _offloads(self) -> list[Run]:
        """Asked for and not carried out: one whose answer was lost is not refused after all."""
        wpgs = self.cluster.wpgs
        return [
            run
            for run in self.cluster.runs
            if run.kind == "offload" and wpgs[run.deployment].device is not None
        ]

    def _loads(self) -> list[Run]:
        """Of versions; asked for and not carried out."""
        wpgs = self.cluster.wpgs
        return [
            run
            for run in self.cluster.runs
            if run.kind == "load" and run.seq and wpgs[run.deployment].device is None
        ]

    def _join(self, node: str, gpus: int) -> None:
        self.cluster.nodes[node] = replace(self.cluster.nodes[node], gpus=gpus)
        self.cluster.join_node(node=node)

    def _submit(self, name: str, kind: str) -> None:
        self.count += 1
        operation = f"{name}:{self.count}"
        try:
            self.cluster.submit(operation, name, kind)
        except errors.OverloadedError:
            return
        if kind in ("forward_backward", "optim_step"):
            self.submitted[name].append(operation)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=examples(20),
    stateful_step_count=50,
    deadline=None,
    # Shrinking and explaining a failure of this size takes many minutes, without an end in sight.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
