"""The controllers of the simulated jobs: each alternates rollouts and training."""

from collections.abc import Callable, Mapping

from plexrl.ids import OperationId
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.shell import VirtualShell
from plexrl.sim.workload.job_run import JobRun
from plexrl.wire.operations import OperationKind

NO_OPERATION = OperationId("")


class Controllers:
    """Submit the jobs' operations and react to their completion."""

    def __init__(
        self,
        shell: VirtualShell,
        runs: Mapping[str, JobRun],
        send: Callable[[ev.Event], None],
        *,
        controller_s: float,
        cycle_over: Callable[[JobRun], None],
        job_over: Callable[[JobRun], None],
    ) -> None:
        """`runs`: live jobs by deployment. `send` passes an event to the core. `cycle_over` is
        called after the last operation of a cycle, `job_over` after the last cycle."""
        self._shell = shell
        self._runs = runs
        self._send = send
        self._controller_s = controller_s
        self._cycle_over = cycle_over
        self._job_over = job_over

    def start(self, run: JobRun) -> None:
        """Start the job's rollouts once its processes run."""
        if run.may_roll and not run.rolled:
            self._roll(run)

    def answered(self, run: JobRun) -> None:
        """Continue the job's cycle after its operation has completed."""
        now = self._shell.now
        run.answered_at = now + self._controller_s
        run.operation = NO_OPERATION
        run.step += 1
        if run.step < len(run.steps):
            gap_s = max(run.steps[run.step].gap_s, self._controller_s)
            self._shell.at(now + gap_s, self._submit, run)
            return
        self._cycle_over(run)
        if run.trained == run.cycles:
            self._job_over(run)
            return
        if run.may_train:
            self._train(run)
        if run.may_roll:
            self._roll(run)

    def _roll(self, run: JobRun) -> None:
        """Begin the next rollout, but not before the controller is ready."""
        begins_at = self._shell.now
        if run.rolled == run.trained + run.staleness and begins_at < run.answered_at:
            begins_at = run.answered_at
        rollout_s = run.begin_rollout()
        if run.rollouts is None:
            self._shell.at(begins_at + rollout_s, self.rollout_ended, run)
        else:
            self._shell.at(begins_at, self._generate, run)

    def _generate(self, run: JobRun) -> None:
        rollouts = run.rollouts
        if rollouts is None or run.deployment not in self._runs:
            return
        self._send(
            ev.OperationSubmitted(
                rollouts.operation(),
                rollouts.deployment,
                OperationKind.GENERATE,
                None,
                None,
                run.draws[-1].tokens,
                ends_burst=True,
            )
        )

    def rollout_ended(self, run: JobRun) -> None:
        """Continue after a rollout."""
        if run.deployment not in self._runs:
            return
        run.rolling = False
        run.rolled += 1
        if run.may_train:
            self._train(run)
        if run.may_roll:
            self._roll(run)

    def _train(self, run: JobRun) -> None:
        run.begin_cycle()
        begins_at = run.answered_at
        if self._shell.now < begins_at:
            self._shell.at(begins_at, self._submit, run)
        else:
            self._submit(run)

    def _submit(self, run: JobRun) -> None:
        if run.deployment not in self._runs:
            return
        number = run.step
        run.operation = OperationId(f"{run.job}:{run.trained}:{number}")
        self._send(
            ev.OperationSubmitted(
                run.operation,
                run.deployment,
                run.steps[number].kind,
                None,
                None,
                run.tokens,
                ends_burst=number + 1 == len(run.steps),
            )
        )
