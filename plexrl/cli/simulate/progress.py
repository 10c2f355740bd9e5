"""Progress bars of simulated runs: one per run, and one for all."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.cli.simulate.tables import span
from plexrl.process.plain_text import one_line
from plexrl.sim.search.one_run import Outcome, label
from plexrl.sim.search.sweep import run_all
from plexrl.sim.workload.scenario import JobSource, Scenario

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID

    from plexrl.sim.engine.simulate import RunProgress

BARS_KEPT = 12
"""Most runs whose bars stay after their end; with more runs only live bars are shown."""


class RunsProgress:
    """Runs scenarios and shows their progress on stderr, if that is a terminal.

    `with Runs(jobs=…, workers=…, ray_address=…, copies=…) as run: outcomes = run(scenarios)`; `run`
    may be called several times.
    """

    def __init__(
        self,
        *,
        jobs: int,
        workers: int | None,
        ray_address: str | None,
        copies: Mapping[JobSource, JobSource],
        quiet: bool = False,
        rows_in: Path | None = None,
    ) -> None:
        """`rows_in`: folder for the job rows of each run."""
        self._jobs = jobs
        self._workers = workers
        self._ray_address = ray_address
        self._copies = copies
        self._quiet = quiet
        self._rows_in = rows_in
        self.job_rows: dict[Scenario, Path] = {}
        """File of job rows by run."""
        self._asked = 0
        self._ended = 0
        self._display: Display | None = None
        self._overall: TaskID | None = None

    def __enter__(self) -> "RunsProgress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._display = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=self._quiet or not sys.stderr.isatty(),
        )
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._display is not None:
            self._display.stop()

    def __call__(self, scenarios: Sequence[Scenario]) -> tuple[Outcome, ...]:
        """The outcomes in the order of the scenarios."""
        display = self._display
        assert display is not None, "enter it first"
        self._asked += len(scenarios)
        if self._overall is None:
            self._overall = display.add_task("all runs", total=self._asked, status="")
        display.update(self._overall, total=self._asked)
        bars: dict[int, TaskID] = {}

        def bar(index: int) -> "TaskID":
            if index not in bars:
                name = one_line(label(scenarios[index]))
                bars[index] = display.add_task(name, total=self._jobs, status="")
            return bars[index]

        def moved(index: int, progress: "RunProgress") -> None:
            status = f"{progress.jobs_done:,} jobs, day {progress.now_s / 86_400:,.1f}"
            display.update(bar(index), completed=progress.jobs_done, status=status)

        def ended(index: int, outcome: Outcome) -> None:
            from plexrl.sim.results.result import SimResult

            status = "failed"
            if isinstance(outcome, SimResult):
                status = f"drained in {span(outcome.drain_s)}"
            visible = self._asked <= BARS_KEPT
            display.update(bar(index), completed=self._jobs, status=status, visible=visible)
            self._ended += 1
            assert self._overall is not None
            display.update(self._overall, completed=self._ended)

        if self._rows_in is not None:
            for scenario in scenarios:
                self.job_rows[scenario] = self._rows_in / f"rows{len(self.job_rows)}"
        return run_all(
            scenarios,
            workers=self._workers,
            ray_address=self._ray_address,
            copies=self._copies,
            job_rows=self.job_rows or None,
            on_progress=moved,
            on_end=ended,
        )
