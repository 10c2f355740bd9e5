"""Random histories of the scheduler core: crashes, delays and repetitions at any point."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plexrl.scheduler.rules.ordering import ORDERINGS
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.liveness import stuck

TRAINERS = ("a/actor", "b/actor", "c/actor")
ROLLOUT = "a/rollout"
MUTATIONS = ("forward_backward", "optim_step")


class History(RuleBasedStateMachine):
    """Three jobs on one group, one of them with a rollout; anything may die at any time.

    The model: what is on a WPG's device is always a prefix of the mutations submitted to it, in
    order, none twice; and when everything has come to rest, it is all of them.
    """

    @initialize(ordering=st.sampled_from(sorted(ORDERINGS)), anticipation=st.booleans())
    def begin(self, ordering: str, anticipation: bool) -> None:
        self.cluster = FakeCluster(ordering=ordering, anticipation=anticipation)
        self.cluster.start_node()
        for job in ("a", "b", "c"):
            self.cluster.job(job)
            self.cluster.deploy(f"{job}/actor")
        self.cluster.deploy(ROLLOUT, "rollout", workers=1)
        self.submitted: dict[str, list[str]] = {name: [] for name in (*TRAINERS, ROLLOUT)}
        self.count = 0

    @rule(name=st.sampled_from(TRAINERS), kind=st.sampled_from((*MUTATIONS, "barrier", "forward")))
    def submit(self, name: str, kind: str) -> None:
        operation = self._new(name)
        self.cluster.submit(operation, name, kind)
        if kind in MUTATIONS:
            self.submitted[name].append(operation)

    @rule(kind=st.sampled_from(("generate", "sync_weights", "barrier")), in_flight=st.booleans())
    def submit_rollout(self, kind: str, in_flight: bool) -> None:
        operation = self._new(ROLLOUT)
        is_sync = kind == "sync_weights"
        source = "a/actor" if is_sync else None
        self.cluster.submit(operation, ROLLOUT, kind, source, in_flight=in_flight and is_sync)
        if kind == "sync_weights":
            self.submitted[ROLLOUT].append(operation)

    @precondition(lambda self: self.cluster.runs)
    @rule(data=st.data(), report=st.booleans())
    def execute(self, data: st.DataObject, report: bool) -> None:
        run = data.draw(st.sampled_from(self.cluster.runs))
        self.cluster.execute(run, report=report)

    @precondition(lambda self: self.cluster.launches)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        self.cluster.launch(data.draw(st.sampled_from(self.cluster.launches)))

    @rule(name=st.sampled_from((*TRAINERS, ROLLOUT)))
    def kill_worker(self, name: str) -> None:
        self.cluster.kill(name)

    @precondition(lambda self: self.cluster.has_router)
    @rule()
    def kill_router(self) -> None:
        self.cluster.lose_router()
        self.cluster.join_router()

    @rule()
    def kill_scheduler(self) -> None:
        self.cluster.restart_scheduler()

    @rule(seconds=st.sampled_from((0.01, 0.1, 5.0, 100.0)))
    def pass_time(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @invariant()
    def every_device_holds_a_prefix_of_what_was_submitted(self) -> None:
        for name, wanted in self.submitted.items():
            wpg = self.cluster.wpgs.get(name)
            if wpg is None or wpg.device is None:
                continue
            if name == ROLLOUT:
                # A sync replaces everything, so a recovery may begin at the last one.
                assert wpg.device == [op for op in wanted if op in wpg.device]
            else:
                assert wpg.device == wanted[: len(wpg.device)]

    @invariant()
    def every_accepted_operation_has_a_cause_to_go_on(self) -> None:
        assert not stuck(self.cluster)

    def teardown(self) -> None:
        self.cluster.settle()
        for job in self.cluster.core.list_jobs(None, self.cluster.now):
            assert job["state"] not in ("FAILED", "CANCELLED")
        for index in range(self.count):
            for name in self.submitted:
                operation = f"{name}:{index + 1}"
                if operation in self._all:
                    assert self.cluster.state_of(operation) == "finished", operation
        for name, wanted in self.submitted.items():
            wpg = self.cluster.wpgs[name]
            view = self.cluster.core.deployment_view(name, self.cluster.now)
            held = (
                wpg.device if wpg.device is not None else wpg.versions.get(view["durable_seq"], [])
            )
            if name == ROLLOUT:
                assert held[-1:] == wanted[-1:] or view["residency"] == "none"
            elif view["residency"] in ("device", "offloaded"):
                assert held == wanted

    def _new(self, name: str) -> str:
        self.count += 1
        operation = f"{name}:{self.count}"
        self._all.add(operation)
        return operation

    @property
    def _all(self) -> set[str]:
        if not hasattr(self, "_operations"):
            self._operations: set[str] = set()
        return self._operations


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=examples(30),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
