"""Failures, acknowledgements and replacements of the controller in random histories of one job.

The model is what a controller may rely on: once a mutation has failed, no mutation that was
submitted after it is applied until the failure is acknowledged; and everything accepted ends.
"""

from contextlib import suppress

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plexrl import errors
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import Run
from plexrl.wire.messages.views import OperationView
from plexrl.wire.operations import MUTATING
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

DEPLOYMENTS = ("a/actor", "a/rollout")
KINDS = {
    "a/actor": ("forward", "forward_backward", "optim_step", "zero_grad", "save_checkpoint"),
    "a/rollout": ("generate", "sync_weights", "sync_weights", "load_checkpoint"),
}
WRONG = errors.ExecutionError("no luck").to_wire()


class Job(RuleBasedStateMachine):
    """A job with a trainer and a rollout."""

    @initialize()
    def start(self) -> None:
        self.cluster = FakeCluster()
        self.cluster.start_node()
        self.cluster.job("a", halts_on_failure=True, controller="0")
        self.cluster.deploy("a/actor")
        self.cluster.deploy("a/rollout", kind="rollout")
        self.controllers = 0
        self.submitted: dict[str, list[str]] = {name: [] for name in DEPLOYMENTS}

    @rule(
        data=st.data(),
        deployment=st.sampled_from(DEPLOYMENTS),
        hasty=st.booleans(),
        count=st.integers(1, 6),
    )
    def submit(self, data: st.DataObject, deployment: str, hasty: bool, count: int) -> None:
        for _ in range(count):
            kind = data.draw(st.sampled_from(KINDS[deployment]))
            self._submit(deployment, kind, 3.0 if hasty else None)

    def _submit(self, deployment: str, kind: str, deadline_s: float | None) -> None:
        name = f"a:{sum(map(len, self.submitted.values()))}"
        source = "a/actor" if kind == "sync_weights" else None
        halted = self._halting(deployment) or (source is not None and self._halting(source))
        try:
            self.cluster.submit(name, deployment, kind, source, deadline_s=deadline_s)
        except errors.EarlierFailureError:
            assert halted, f"{name} is refused for nothing"
            return
        assert not halted or kind in ("forward", "generate"), f"{name} builds on a failure"
        self.submitted[deployment].append(name)

    @rule(index=st.integers(0, 5), state_intact=st.booleans())
    def fail(self, index: int, state_intact: bool) -> None:
        self._launch()
        for _ in range(10):
            if (found := self._failable()) or not self.cluster.runs:
                break
            self.cluster.execute(self.cluster.runs[0])
        if not found:
            return
        run = found[index % len(found)]
        self.cluster.runs.remove(run)
        self.cluster.send(
            ev.OperationFailed(
                operation=run.operation,
                token=run.token,
                error=WRONG,
                state_intact=state_intact,
            )
        )

    @rule(
        what=st.sampled_from(("cancel", "recover", "attach", "kill", "crash", "restore", "time")),
        deployment=st.sampled_from(DEPLOYMENTS),
        index=st.integers(0, 99),
    )
    def disturb(self, what: str, deployment: str, index: int) -> None:
        names = self.submitted[deployment]
        match what:
            case "cancel" if names:
                with suppress(errors.ConflictError):
                    operation = names[index % len(names)]
                    self.cluster.send(ev.OperationCancelled(operation=operation))
            case "recover":
                self.cluster.send(ev.FailureAcknowledged(deployment=deployment))
                assert not self._halting(deployment)
            case "attach":
                self.controllers += 1
                token = str(self.controllers)
                self.cluster.send(ev.ControllerAttached(job="a", controller=token))
            case "kill":
                self.cluster.kill(deployment)
            case "crash" | "restore":
                self.cluster.restart_scheduler(restored=what == "restore")
            case "time":
                self.cluster.pass_time((0.5, 5.0)[index % 2])

    @rule(count=st.integers(1, 12))
    def work(self, count: int) -> None:
        self._launch()
        for _ in range(count):
            if self.cluster.runs:
                self.cluster.execute(self.cluster.runs[0])

    def _launch(self) -> None:
        while self.cluster.launches:
            self.cluster.launch(self.cluster.launches[0])

    @invariant()
    def nothing_is_applied_that_builds_on_a_failure(self) -> None:
        for deployment, names in self.submitted.items():
            failed = self._failed_mutations(deployment)
            halting = [name for name in failed if name in names]
            if halting:
                later = names[min(map(names.index, halting)) + 1 :]
                for name in later:
                    view = self._view(name)
                    if view["kind"] in MUTATING:
                        assert view["state"] in ("failed", "cancelled"), f"{name}: {view['state']}"

    def teardown(self) -> None:
        for deployment in DEPLOYMENTS:
            self.cluster.send(ev.FailureAcknowledged(deployment=deployment))
        self.cluster.settle()
        for names in self.submitted.values():
            for name in names:
                assert self._view(name)["state"] in ("finished", "failed", "cancelled"), name
        for deployment in DEPLOYMENTS:
            view = self.cluster.core.deployment_view(deployment, self.cluster.now)
            assert view["failure"] is None
            applied = self.cluster.wpgs[deployment].device
            assert applied is None or not self._wrong(applied)

    def _wrong(self, applied: list[str]) -> list[str]:
        """Users' operations that were applied and have not finished."""
        return [
            name for name in applied if "#" not in name and self._view(name)["state"] != "finished"
        ]

    def _view(self, operation: str) -> OperationView:
        return self.cluster.core.operation_view(operation, self.cluster.now)

    def _failable(self) -> list[Run]:
        wpgs = self.cluster.wpgs
        return [
            run
            for run in self.cluster.runs
            if run.kind not in ("load", "offload", "snapshot")
            and not run.replay
            and run.operation not in (wpgs[run.deployment].device or ())
        ]

    def _failed_mutations(self, deployment: str) -> list[str]:
        """Operations of the deployment itself whose failure halts it."""
        context = self.cluster.core._context
        kept = context.state.deployment(deployment).work.unacknowledged
        return [failure.operation for failure in kept if failure.halts]

    def _halting(self, deployment: str) -> bool:
        return bool(self._failed_mutations(deployment))


TestJob = Job.TestCase
TestJob.settings = settings(
    max_examples=examples(40),
    stateful_step_count=40,
    deadline=None,
    # Shrinking a history of this size takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
