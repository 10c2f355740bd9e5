"""The controllers of all jobs of a simulated run: each rolls out, trains on it, and so on."""

from collections.abc import Callable, Mapping

from plexrl.ids import OperationId
from plexrl.scheduler.state import events as ev
from plexrl.sim.engine.job_run import JobRun
from plexrl.sim.engine.shell import VirtualShell

NONE = OperationId("")


class Controllers:
    """Submit the jobs' operations, by `tell`, and take the answers."""

    def __init__(
        self,
        shell: VirtualShell,
        runs: Mapping[str, JobRun],
        tell: Callable[[ev.Event], None],
        *,
        controller_s: float,
        cycle_over: Callable[[JobRun], None],
        job_over: Callable[[JobRun], None],
    ) -> None:
        """`runs`: live jobs, by deployment. `cycle_over`: the last operation of a cycle has been
        answered; `job_over`: that was the last cycle."""
        self._shell = shell
        self._runs = runs
        self._tell = tell
        self._controller_s = controller_s
        self._cycle_over = cycle_over
        self._job_over = job_over

    def start(self, run: JobRun) -> None:
        """The job's processes are there, for the first time or again."""
        if run.may_roll and not run.rolled:
            self._roll(run)

    def answered(self, run: JobRun) -> None:
        """The operation of the job's cycle is over."""
        now = self._shell.now
        run.answered_at = now + self._controller_s
        run.operation = NONE
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
        """Begin the next rollout, now or once the controller has had its time."""
        begins_at = self._shell.now
        if run.rolled == run.trained + run.staleness and begins_at < run.answered_at:
            begins_at = run.answered_at
        self._shell.at(begins_at + run.begin_rollout(), self._rolled, run)

    def _rolled(self, run: JobRun) -> None:
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
        if self._shell.now < run.answered_at:
            self._shell.at(run.answered_at, self._submit, run)
        else:
            self._submit(run)

    def _submit(self, run: JobRun) -> None:
        if run.deployment not in self._runs:
            return
        number = run.step
        run.operation = OperationId(f"{run.job}:{run.trained}:{number}")
        self._tell(
            ev.OperationSubmitted(
                run.operation,
                run.deployment,
                run.steps[number].kind,
                "{}",
                None,
                run.tokens,
                ends_burst=number + 1 == len(run.steps),
            )
        )
